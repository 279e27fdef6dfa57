// Multiplies rows by a packed weight matrix of 8 or 4 bits.
//
// Inputs and weights are rounded in groups of inputs. A column stores a scale and a least weight for each group, and a
// row stores a scale. Sums within a group are integers and therefore exact. A row's groups are added in order.
#pragma once

#include "matmul.h"

namespace carousel {

// With 8 bits, inputs and weights are rotated within a group by the same orthogonal matrix: (x H)(Hᵀ W) = x W. This
// spreads a row's few large inputs over their group, so that eight bits suffice for all inputs (QuaRot, Ashkboos et
// al., 2024; QuIP#, Tseng et al., 2024). With 4 bits, there is no rotation, so that weights from a file of 4 bits lose
// no further accuracy.
template <int BITS>
struct Grouping;
template <>
struct Grouping<8> {
    static constexpr int64_t SIZE = 64;  // inputs
    static constexpr bool IS_ROTATED = true;
};
template <>
struct Grouping<4> {
    static constexpr int64_t SIZE = 32;
    static constexpr bool IS_ROTATED = false;
};

template <int BITS>
constexpr int64_t GROUP_UNITS = Grouping<BITS>::SIZE / PER_UNIT<int8_t>;  // of inputs
template <int BITS>
constexpr int64_t GROUP_WORDS = GROUP_UNITS<BITS> * BITS / 8;  // of weights

constexpr int HEAD_BITS = 8;  // of the head, regardless of the layers' bits

template <int BITS>
constexpr int64_t num_groups(int64_t num_inputs) {
    return (num_inputs + Grouping<BITS>::SIZE - 1) / Grouping<BITS>::SIZE;
}

// Panels are [num_columns / PANEL][num_groups][1 + GROUP_WORDS][PANEL] units. A group's first unit stores the scale in
// its lower half and the least weight in its upper half, both in bfloat16. The other units store unsigned numbers; a
// weight is the least weight plus its number times the scale. With 4 bits, the lower half of each byte belongs to the
// first half of the group's inputs, the upper half to the second. The last group is padded with zeros.
template <int BITS>
constexpr int64_t panel_units(int64_t num_inputs) {
    return num_groups<BITS>(num_inputs) * (1 + GROUP_WORDS<BITS>);
}

struct QuantisedRows {
    int8_t* numbers;  // [num_rows][num_groups][inputs of a group]
    float* scales;    // [num_rows][num_groups]
    float* sums;      // [num_rows][num_groups], sums of the numbers times the scale
};

// Returns the rows from `first` on.
template <int BITS>
inline QuantisedRows rows_from(const QuantisedRows& rows, int64_t first, int64_t num_inputs) {
    const int64_t group = first * num_groups<BITS>(num_inputs);
    return {rows.numbers + group * Grouping<BITS>::SIZE, rows.scales + group, rows.sums + group};
}

// One stage of a Hadamard transform: sums and differences of lanes that are DISTANCE apart.
template <int DISTANCE>
inline Vector paired(Vector x) {
    const Integers lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Words signs = (Words)(lanes & DISTANCE) * (0x80000000u / DISTANCE);
    return swapped<DISTANCE>(x) + (Vector)((Words)x ^ signs);
}

// Multiplies a group by the Hadamard matrix of its size, without dividing by 8, the square root of the size.
inline void rotate(Vector (&group)[4]) {
    const auto pair = [](Vector& left, Vector& right) {
        const Vector sum = left + right;
        right = left - right;
        left = sum;
    };
    pair(group[0], group[1]), pair(group[2], group[3]);
    pair(group[0], group[2]), pair(group[1], group[3]);
    for (Vector& x : group) x = paired<8>(paired<4>(paired<2>(paired<1>(x))));
}

// Rounds a row. If a group contains a NaN or an infinity, neither its scale nor any product of the row is finite.
// `size` must be a multiple of LANES.
template <int BITS, typename T>
inline void quantise(const T* from, int64_t size, const QuantisedRows& rows, int64_t row) {
    constexpr int PARTS = Grouping<BITS>::SIZE / LANES;
    const int64_t groups = num_groups<BITS>(size);
    int8_t* to = rows.numbers + row * groups * Grouping<BITS>::SIZE;
    for (int64_t group = 0; group < groups; ++group) {
        Vector x[PARTS];
        for (int64_t part = 0; part < PARTS; ++part, from += LANES)
            x[part] = (group * PARTS + part) * LANES < size ? load(from) : Vector{};
        if constexpr (Grouping<BITS>::IS_ROTATED) rotate(x);
        Magnitude of_group;
        for (const Vector& part : x) of_group.add(part);
        const float magnitude = of_group.value(), steps = int8_steps(magnitude);
        Integers sums = {};
        for (const Vector& part : x) {
            const Integers numbers = nearest(part * steps);
            const Bytes bytes = __builtin_convertvector(numbers, Bytes);
            std::memcpy(to, &bytes, sizeof(bytes));
            to += LANES;
            sums += numbers;
        }
        sums += swapped<8>(sums), sums += swapped<4>(sums), sums += swapped<2>(sums), sums += swapped<1>(sums);
        const float scale = magnitude * (Grouping<BITS>::IS_ROTATED ? 0.125f / 127.0f : 1.0f / 127.0f);
        rows.scales[row * groups + group] = scale;
        rows.sums[row * groups + group] = scale * float(sums[0]);
    }
}

template <typename W>
inline auto lower_bf16(W pairs) {
    typedef float Floats __attribute__((vector_size(sizeof(W))));
    return (Floats)(pairs << 16);
}
template <typename W>
inline auto upper_bf16(W pairs) {
    typedef float Floats __attribute__((vector_size(sizeof(W))));
    return (Floats)(pairs & 0xffff0000u);
}

// Reads the weights of a column, [num_inputs].
template <int BITS>
inline void read_column(const Matrix& matrix, int64_t column, float* to) {
    static_assert(BITS == 8, "a head has 8 bits");
    const uint32_t* unit = matrix.panels + column / PANEL * PANEL * panel_units<BITS>(matrix.num_inputs) + column % PANEL;
    for (int64_t first = 0; first < matrix.num_inputs; first += Grouping<BITS>::SIZE) {
        const Words pair = broadcast(*unit);
        uint32_t units[GROUP_UNITS<BITS>];
        for (uint32_t& own : units) own = *(unit += PANEL);
        unit += PANEL;
        Vector x[4];
        for (int64_t part = 0; part < 4; ++part) {
            UnsignedBytes numbers;
            std::memcpy(&numbers, units + part * LANES / PER_UNIT<int8_t>, sizeof(numbers));
            x[part] = __builtin_convertvector(numbers, Vector) * lower_bf16(pair) + upper_bf16(pair);
        }
        rotate(x);
        for (int64_t part = 0; part < 4 && first + part * LANES < matrix.num_inputs; ++part)
            store(x[part] * 0.125f, to + first + part * LANES);
    }
}

// Adds a group's integer sums to a row's totals. pairs: scales and least weights.
template <typename F, typename I, typename W>
inline void add_group(F& totals, I sums, W pairs, float scale, float sum) {
    totals += upper_bf16(pairs) * sum;
    totals += __builtin_convertvector(sums, F) * (lower_bf16(pairs) * scale);
}

// Computes a group's integer sums for ROWS rows, `stride` units apart, and DOT_WIDTH registers of columns.
template <int BITS, int ROWS>
inline __attribute__((always_inline)) void sum_group(IntegersPart (&sums)[ROWS][DOT_WIDTH], const uint32_t* units,
                                                     int64_t stride, const uint32_t* words, const Ahead& next) {
    constexpr bool HAS_HALVES = BITS == 8 && (DOT == Dot::HALVES || DOT == Dot::SHORTS);  // of a weight, each with its own sums
    constexpr int SUMS = HAS_HALVES ? 2 : 1, WEIGHTS = HAS_HALVES || BITS == 4 ? 2 : 1;
    constexpr int64_t WORDS = GROUP_WORDS<BITS>, TOGETHER = DOT == Dot::SHORTS ? BITS : WORDS;  // 8 units of inputs
    for (int64_t first = 0; first < WORDS; first += TOGETHER) {
        IntegersPart own[SUMS][ROWS][DOT_WIDTH] = {};
        for (int64_t word = first; word < first + TOGETHER; ++word) {
            WordsPart weights[WEIGHTS][DOT_WIDTH];
#pragma GCC unroll 2
            for (int at = 0; at < DOT_WIDTH; ++at) {
                const uint32_t* from = words + word * PANEL + at * PART_LANES;
                if (next.stride) __builtin_prefetch(next.from + word * next.stride + at * PART_LANES, 0, 2);
                std::memcpy(&weights[0][at], from, sizeof(weights[0][at]));
                if constexpr (WEIGHTS == 2) {
                    weights[1][at] = weights[0][at] >> 4 & 0x0f0f0f0fu;
                    weights[0][at] &= 0x0f0f0f0fu;
                }
            }
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
                for (int part = 0; part < WEIGHTS; ++part) {
                    const WordsPart input = WordsPart{} + units[row * stride + word + (BITS == 4 ? part * WORDS : 0)];
#pragma GCC unroll 2
                    for (int at = 0; at < DOT_WIDTH; ++at) {
                        IntegersPart& sum = own[HAS_HALVES ? part : 0][row][at];
                        sum = dot(sum, weights[part][at], input);
                        if constexpr (DOT == Dot::SHORTS) keep_in_register(sum);
                    }
                }
        }
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
            for (int at = 0; at < DOT_WIDTH; ++at) {
                sums[row][at] += widened(own[0][row][at], 1);
                if constexpr (HAS_HALVES) sums[row][at] += widened(own[1][row][at], 16);
            }
    }
}

// inputs: from the first row on. results: the sums of the panel's two halves, for each row. Not inlined, because it has
// many callers and compiles slowly.
template <int BITS, int ROWS>
[[gnu::noinline]] void multiply_quantised_tile(const QuantisedRows& inputs, int64_t groups, const uint32_t* panel,
                                               const Ahead& next, Vector (*results)[2]) {
    constexpr int64_t UNITS = GROUP_UNITS<BITS>;
    const uint32_t* units = reinterpret_cast<const uint32_t*>(inputs.numbers);
    FloatPart totals[ROWS][2 * PARTS] = {};
    for (int64_t group = 0; group < groups; ++group, units += UNITS, panel += (1 + GROUP_WORDS<BITS>) * PANEL) {
        const uint32_t* ahead = next.from + group * (1 + GROUP_WORDS<BITS>) * next.stride;
        for (int part = 0; part < 2 * PARTS; part += DOT_WIDTH) {
            const uint32_t* from = panel + part * PART_LANES;
            IntegersPart sums[ROWS][DOT_WIDTH] = {};
            const uint32_t* const later = ahead + part * PART_LANES;
            sum_group<BITS, ROWS>(sums, units, groups * UNITS, from + PANEL, {later + next.stride, next.stride});
#pragma GCC unroll 2
            for (int at = 0; at < DOT_WIDTH; ++at) {
                WordsPart pairs;
                if (next.stride) __builtin_prefetch(later + at * PART_LANES, 0, 2);
                std::memcpy(&pairs, from + at * PART_LANES, sizeof(pairs));
#pragma GCC unroll 16
                for (int row = 0; row < ROWS; ++row)
                    add_group(totals[row][part + at], sums[row][at], pairs, inputs.scales[row * groups + group],
                              inputs.sums[row * groups + group]);
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row)  // copying all at once would make GCC keep them in memory
#pragma GCC unroll 8
        for (int part = 0; part < 2 * PARTS; ++part)
            std::memcpy(reinterpret_cast<FloatPart*>(results[row]) + part, &totals[row][part], sizeof(FloatPart));
}

// Like `multiply_quantised_tile`, on the matrix unit.
template <int BITS>
[[gnu::noinline]] void multiply_quantised_in_amx(int rows, const QuantisedRows& inputs, int64_t groups,
                                                 const uint32_t* panel, Vector (*results)[2]) {
    constexpr int64_t UNITS = GROUP_UNITS<BITS>, WORDS = GROUP_WORDS<BITS>;
    const uint32_t* units = reinterpret_cast<const uint32_t*>(inputs.numbers);
    alignas(64) int32_t sums[2][2 * amx::ROWS * PANEL];  // of the group that is being added, and of the next
    std::fill_n(results[0], 2 * rows, Vector{});
    configure_products(rows, UNITS);
    const auto sum_group = [&](int64_t group) {
        const uint32_t* weights = panel + (group * (1 + WORDS) + 1) * PANEL;
        uint32_t bytes[UNITS * PANEL];
        if constexpr (BITS == 4) {
            for (int64_t at = 0; at < WORDS * PANEL; at += LANES) {
                const Words packed = load_units(weights + at), low = packed & 0x0f0f0f0fu, high = packed >> 4 & 0x0f0f0f0fu;
                std::memcpy(bytes + at, &low, sizeof(low));
                std::memcpy(bytes + WORDS * PANEL + at, &high, sizeof(high));
            }
            weights = bytes;
        }
        sum_in_amx<int8_t>(rows, units + group * UNITS, groups * UNITS, UNITS, weights, sums[group % 2]);
    };
    sum_group(0);
    for (int64_t group = 0; group < groups; ++group) {
        if (group + 1 < groups) sum_group(group + 1);
        const uint32_t* pair = panel + group * (1 + WORDS) * PANEL;
        const Words pairs[2] = {load_units(pair), load_units(pair + LANES)};
        for (int row = 0; row < rows; ++row) {
            Integers both[2];
            std::memcpy(both, sums[group % 2] + row * PANEL, sizeof(both));
            for (const int half : {0, 1})
                add_group(results[row][half], both[half], pairs[half], inputs.scales[row * groups + group],
                          inputs.sums[row * groups + group]);
        }
    }
}

// Like `multiply`, for quantised matrices.
template <int BITS, typename Sharing, typename Finish, typename Added = NothingAdded>
void multiply_quantised(Sharing& threads, const QuantisedRows& inputs, int64_t num_rows, const Matrix& matrix,
                        Finish&& finish, const Added& added = {}) {
    const int64_t groups = num_groups<BITS>(matrix.num_inputs);
    const int64_t units = panel_units<BITS>(matrix.num_inputs);
    if (amx::refusal() == 0)
        return share_tiles<2 * amx::ROWS>(
            threads, num_rows, amx::ROWS, matrix, units,
            [&](int rows, int64_t first, int64_t, const uint32_t* panel, const Ahead&, Vector (*sums)[2]) {
                const QuantisedRows from = rows_from<BITS>(inputs, first, matrix.num_inputs);
                multiply_quantised_in_amx<BITS>(rows, from, groups, panel, sums);
            },
            finish, added);
    share_tiles<DOT_ROWS>(
        threads, num_rows, 1, matrix, units,
        [&](int rows, int64_t first, int64_t, const uint32_t* panel, const Ahead& next, Vector (*sums)[2]) {
            const QuantisedRows from = rows_from<BITS>(inputs, first, matrix.num_inputs);
            switch (rows) {
#define CASE(ROWS)                                                                 \
    case ROWS:                                                                     \
        if constexpr (ROWS <= DOT_ROWS)                                            \
            multiply_quantised_tile<BITS, ROWS>(from, groups, panel, next, sums);  \
        break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
            }
        },
        finish, added);
}

}  // namespace carousel
