// Multiplies rows by a matrix in the types of a GGUF file.
//
// The formats are those of ggml in llama.cpp (`block_q4_K` and similar ones in ggml-common.h). A file stores blocks row
// by row. Here, the LANES columns of a *strip* are interleaved, so that a register holds the same input of several
// columns. Bits, scales and minima do not change, so packing a matrix rounds nothing.
#pragma once

#include "quantised.h"

namespace carousel {

constexpr int64_t GROUP = 32;   // inputs
constexpr int64_t BLOCK = 256;  // inputs; ggml's QK_K
constexpr int64_t GROUPS_OF_BLOCK = BLOCK / GROUP, PAIRS_OF_BLOCK = GROUPS_OF_BLOCK / 2;

// How the inputs of stored matrices are rounded, as bits of `DecoderShape::weight_bits`, which is below 4 only then.
constexpr int64_t IN_GROUPS = 1, IN_BLOCKS = 2;
constexpr bool is_stored(int64_t bits) { return bits > 0 && bits < 4; }

// The layout of a strip in memory, in lines of LANES units. stored_matrix.py must use the same number for PLAIN.
//   GROUPS_n, for each GROUP of inputs: a line with the scale (lower half) and the least weight (upper half) in
//       float16, then n lines of numbers. A weight is scale × number + least.
//   BLOCKS_n, for each BLOCK of inputs: a line with two factors in float16, four lines of bytes, then n lines of
//       numbers for each of its groups. Byte 0 of line i belongs to group 2 i, byte 2 to group 2 i + 1: a weight is
//       factor 0 × byte × number - factor 1 × next byte. In BLOCKS_6, each half of a group has its own byte, and a
//       weight is factor 0 × byte × number - factor 1 × byte.
// A group's numbers of 4 bits: in line i, the lower halves of the bytes are inputs 4 i to 4 i + 3, the upper halves the
// inputs 16 further. With 5 and 6 bits, 1 and 2 lines follow with the upper bits: for unit u, bit u of each byte, or
// two bits from 2 (u mod 4) on in line u / 4. With 8 bits, line i has inputs 4 i to 4 i + 3.
// PLAIN: the whole matrix is not quantised and has the layout of matmul.h.
enum StripKind : uint32_t { PLAIN, GROUPS_4, GROUPS_5, GROUPS_8, BLOCKS_4, BLOCKS_5, BLOCKS_6, BLOCKS_8 };

// A matrix starts with a table of these, one for each strip, padded to whole lines.
struct Strip {
    uint32_t kind, line;  // line: where the strip starts in the matrix
};

inline const Strip& strip_of(const uint32_t* matrix, int64_t column) {
    return reinterpret_cast<const Strip*>(matrix)[column / LANES];
}
inline const uint32_t* numbers_of(const uint32_t* matrix, const Strip& strip) { return matrix + int64_t(strip.line) * LANES; }

// Rows of inputs, rounded to int8 in blocks like ggml's Q8_K.
struct BlockRows {
    int8_t* numbers;  // [num_rows][num_inputs]
    float* scales;    // [num_rows][num_blocks]
    // [num_rows][num_blocks][pairs of groups][3], in pairs of int16 for the two groups. The three are the sums of the
    // numbers in the first half of a group, in the second half, and in the whole group.
    uint32_t* sums;
};

constexpr int64_t SUM_WORDS = 3 * PAIRS_OF_BLOCK;  // of a block

struct StoredRows {
    QuantisedRows groups;
    BlockRows blocks;
};

// Returns the rows from `first` on.
inline StoredRows rows_from(const StoredRows& rows, int64_t first, int64_t num_inputs) {
    const int64_t block = first * (num_inputs / BLOCK);
    return {rows_from<4>(rows.groups, first, num_inputs),
            {rows.blocks.numbers + block * BLOCK, rows.blocks.scales + block, rows.blocks.sums + block * SUM_WORDS}};
}

// Rounds a row in blocks. `size` must be a multiple of BLOCK. A NaN or infinity becomes its block's scale.
template <typename T>
inline void quantise_blocks(const T* from, int64_t size, const BlockRows& rows, int64_t row) {
    for (int64_t block = row * (size / BLOCK), end = block + size / BLOCK; block < end; ++block, from += BLOCK) {
        Magnitude greatest;
        for (int64_t at = 0; at < BLOCK; at += LANES) greatest.add(load(from + at));
        const float magnitude = greatest.value(), steps = int8_steps(magnitude);
        rows.scales[block] = magnitude / 127.0f;
        uint16_t sums[BLOCK / LANES];
        for (int64_t at = 0; at < BLOCK; at += LANES) {
            Integers numbers = nearest(load(from + at) * steps);
            const Bytes bytes = __builtin_convertvector(numbers, Bytes);
            std::memcpy(rows.numbers + block * BLOCK + at, &bytes, sizeof(bytes));
            numbers += swapped<8>(numbers), numbers += swapped<4>(numbers), numbers += swapped<2>(numbers);
            sums[at / LANES] = uint16_t(numbers[0] + numbers[1]);
        }
        uint32_t* to = rows.sums + block * SUM_WORDS;
        const auto both = [](uint16_t low, uint16_t high) { return uint32_t(low) | uint32_t(high) << 16; };
        for (const uint16_t* own = sums; own < std::end(sums); own += 4, to += 3) {
            to[0] = both(own[0], own[2]), to[1] = both(own[1], own[3]);
            to[2] = both(uint16_t(own[0] + own[1]), uint16_t(own[2] + own[3]));
        }
    }
}

constexpr int STRIP_ROWS = DOT == Dot::PLAIN ? 2 : DOT == Dot::SHORTS && PARTS == 2 ? 6 : 12;

// Computes sums[row][half] of at most STRIP_ROWS rows and a strip that is not PLAIN. Reads STRIP_ROWS rows, so the
// inputs must have memory for them.
void multiply_strip(const Strip& strip, const uint32_t* from, int rows, const StoredRows& inputs, int64_t num_inputs,
                    int half, Vector (*sums)[2]);

// Dequantises a column of a strip that is not PLAIN, [num_inputs].
void read_strip(const Strip& strip, const uint32_t* from, int64_t lane, int64_t num_inputs, float* to);

// Like `multiply`, for stored matrices. inputs: not rounded, for plain matrices.
template <typename T, typename Sharing, typename Finish, typename Added = NothingAdded>
void multiply_stored(Sharing& threads, const T* inputs, const StoredRows& rounded, int64_t num_rows, const Matrix& matrix,
                     Finish&& finish, const Added& added = {}) {
    const Strip& first_strip = strip_of(matrix.panels, 0);
    if (first_strip.kind == PLAIN) {
        const Matrix plain{numbers_of(matrix.panels, first_strip), matrix.num_inputs, matrix.num_columns};
        return multiply<T>(threads, inputs, num_rows, plain, finish, added);
    }
    share_tiles<STRIP_ROWS>(
        threads, num_rows, 1, matrix, 0,
        [&](int rows, int64_t first, int64_t column, const uint32_t*, const Ahead&, Vector (*sums)[2]) {
            const StoredRows from = rows_from(rounded, first, matrix.num_inputs);
            for (const int half : {0, 1}) {
                const Strip& strip = strip_of(matrix.panels, column + half * LANES);
                multiply_strip(strip, numbers_of(matrix.panels, strip), rows, from, matrix.num_inputs, half, sums);
            }
        },
        finish, added);
}

// Returns where the strip that contains `column` starts.
inline const uint32_t* stored_from(const Matrix& matrix, int64_t column) {
    const Strip& first = strip_of(matrix.panels, 0);
    return numbers_of(matrix.panels, first.kind == PLAIN ? first : strip_of(matrix.panels, column));
}

// Dequantises a column of a matrix.
template <typename T>
void read_stored_column(const Matrix& matrix, int64_t column, float* to) {
    const Strip& strip = strip_of(matrix.panels, strip_of(matrix.panels, 0).kind == PLAIN ? 0 : column);
    const uint32_t* from = numbers_of(matrix.panels, strip);
    if (strip.kind == PLAIN) return read_column<T>({from, matrix.num_inputs, matrix.num_columns}, column, to);
    read_strip(strip, from, column % LANES, matrix.num_inputs, to);
}

}  // namespace carousel
