// The innermost loops of matrix products and attention, whose sums must stay in the CPU's registers.
#pragma once

#include <type_traits>

#include "amx.h"
#include "vectors.h"

namespace carousel {

// The numbers in a register. GCC keeps arrays of larger vectors in memory, which is ten times slower.
#if defined(__AVX512F__)
constexpr int PART_LANES = 16;
constexpr int MOST_SUMS = 24;  // vectors that fit in registers together with their factors
#elif defined(__AVX__)
constexpr int PART_LANES = 8;
constexpr int MOST_SUMS = 6;
#else
constexpr int PART_LANES = 4;
constexpr int MOST_SUMS = 6;
#endif
constexpr int PARTS = LANES / PART_LANES;
typedef float FloatPart __attribute__((vector_size(PART_LANES * 4)));
typedef uint32_t WordsPart __attribute__((vector_size(PART_LANES * 4)));
typedef int32_t IntegersPart __attribute__((vector_size(PART_LANES * 4)));

#ifdef __AVX512BF16__
constexpr bool MULTIPLIES_BF16 = true;
#else
constexpr bool MULTIPLIES_BF16 = false;
#endif

// Rows of bfloat16 that are converted to float32 in advance, because without a bfloat16 instruction every product would
// convert its number again.
struct Widened {};
// The form in which rows are multiplied by units of a type.
template <typename T>
using Factor = std::conditional_t<std::is_same_v<T, bf16> && !MULTIPLIES_BF16 && !amx::IS_BUILT, Widened, T>;
template <typename T>
constexpr int FACTOR_WORDS = std::is_same_v<Factor<T>, Widened> ? 2 : 1;  // words of a row per unit

template <typename T>
constexpr int64_t words_of(int64_t count) { return FACTOR_WORDS<T> * count / PER_UNIT<T>; }  // of `count` numbers

// Stores numbers of a row, rounded to the type.
template <typename T>
inline void store_factors(Vector x, uint32_t* row, int64_t at) {
    if constexpr (std::is_same_v<Factor<T>, Widened>)
        store(round_to(x, T{}), reinterpret_cast<float*>(row) + at);
    else
        store_rounded(x, reinterpret_cast<T*>(row) + at);
}
// Copies a row of `count` numbers.
template <typename T>
inline void copy_factors(const T* from, int64_t count, uint32_t* row) {
    if constexpr (std::is_same_v<Factor<T>, Widened>)
        for (int64_t at = 0; at < count; at += LANES)
            store_some(load_some(from + at, count - at), reinterpret_cast<float*>(row) + at, count - at);
    else
        std::memcpy(row, from, count * sizeof(T));
}

// The body of `add_products`, with the sums in registers.
template <typename T, int ROWS, int WIDTH>
inline __attribute__((always_inline)) void add_in_registers(FloatPart (&sums)[ROWS][WIDTH * PARTS],
                                                            const uint32_t* const (&places)[WIDTH],
                                                            const uint32_t* const (&ahead)[WIDTH], int64_t stride,
                                                            int64_t ahead_stride, const uint32_t* rows,
                                                            int64_t row_stride, int64_t num_units, uint32_t mask) {
    constexpr int ALL = WIDTH * PARTS, FOURS = (ROWS + 3) / 4;
    const uint32_t* fours[FOURS];
    for (int four = 0; four < FOURS; ++four) fours[four] = rows + 4 * four * row_stride;
    int64_t stride_of_3 = 3 * row_stride;
    [[maybe_unused]] const uint32_t upper = mask & 0xffff0000u;
    const auto input = [&](int row, int word = 0) {
        return WordsPart{} + fours[row / 4][(row % 4 == 3 ? stride_of_3 : row % 4 * row_stride) + word];
    };
    for (int64_t unit = 0; unit < num_units; ++unit) {
        // One address serves four rows. GCC would use one per row, which is more than there are registers.
#pragma GCC unroll 16
        for (int four = 0; four < FOURS; ++four) __asm__("" : "+r"(fours[four]));
        __asm__("" : "+r"(stride_of_3), "+r"(row_stride));
        WordsPart units[ALL];
#pragma GCC unroll 16
        for (int part = 0; part < ALL; ++part) {
            if (part % PARTS == 0) __builtin_prefetch(ahead[part / PARTS] + unit * ahead_stride, 0, 2);
            std::memcpy(&units[part], places[part / PARTS] + unit * stride + part % PARTS * PART_LANES,
                        sizeof(units[part]));
            if constexpr (MULTIPLIES_BF16 && std::is_same_v<T, bf16>) units[part] &= mask;
        }
        if constexpr (std::is_same_v<T, float>) {
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; ++row) {
                const FloatPart own = (FloatPart)(input(row));
#pragma GCC unroll 16
                for (int part = 0; part < ALL; ++part) sums[row][part] += (FloatPart)units[part] * own;
            }
        } else if constexpr (MULTIPLIES_BF16 && std::is_same_v<T, bf16>) {
#ifdef __AVX512BF16__
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; ++row) {
                const WordsPart own = input(row);
#pragma GCC unroll 16
                for (int part = 0; part < ALL; ++part)
                    sums[row][part] = (FloatPart)_mm512_dpbf16_ps((__m512)sums[row][part], (__m512bh)units[part],
                                                                  (__m512bh)own);
            }
#endif
        } else {
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const auto number = [&](WordsPart both) { return (FloatPart)(half ? both << 16 : both & upper); };
#pragma GCC unroll 16
                for (int row = 0; row < ROWS; ++row) {
                    const FloatPart own = std::is_same_v<T, Widened> ? (FloatPart)input(row, 1 - half) : number(input(row));
#pragma GCC unroll 16
                    for (int part = 0; part < ALL; ++part) sums[row][part] += number(units[part]) * own;
                }
            }
        }
#pragma GCC unroll 16
        for (int four = 0; four < FOURS; ++four) fours[four] += std::is_same_v<T, Widened> ? 2 : 1;
    }
}

// Not inlined, because GCC keeps the sums in memory if it sees that they are used as larger vectors afterwards.
template <typename T, int ROWS, int WIDTH>
__attribute__((noinline)) void add_parts(Vector (&sums)[ROWS][WIDTH], const uint32_t* const (&places)[WIDTH],
                                         const uint32_t* const (&ahead)[WIDTH], int64_t stride, int64_t ahead_stride,
                                         const uint32_t* rows, int64_t row_stride, int64_t num_units, uint32_t mask) {
    FloatPart parts[ROWS][WIDTH * PARTS];
    std::memcpy(parts, sums, sizeof(parts));
    add_in_registers<T, ROWS, WIDTH>(parts, places, ahead, stride, ahead_stride, rows, row_stride, num_units, mask);
    std::memcpy(sums, parts, sizeof(parts));
}

// sums[row][place] += units of a place × units of a row, unit by unit. A place's units are `stride` apart. With each
// unit, one of `ahead` is prefetched, `ahead_stride` apart. mask: applied to all places' units, to clear upper halves.
template <typename T, int ROWS, int WIDTH>
inline void add_products(Vector (&sums)[ROWS][WIDTH], const uint32_t* const (&places)[WIDTH],
                         const uint32_t* const (&ahead)[WIDTH], int64_t stride, int64_t ahead_stride,
                         const uint32_t* rows, int64_t row_stride, int64_t num_units, uint32_t mask = ~0u) {
    if constexpr (PARTS == 1)
        add_in_registers<T, ROWS, WIDTH>(sums, places, ahead, stride, ahead_stride, rows, row_stride, num_units, mask);
    else
        add_parts<T, ROWS, WIDTH>(sums, places, ahead, stride, ahead_stride, rows, row_stride, num_units, mask);
}

// How four unsigned weights × four signed inputs from -127 to 127 are summed in 32 bits. All variants are exact, so
// their results are equal.
enum class Dot {
    BYTES,   // one instruction
    HALVES,  // one instruction for weights of 4 bits
    SHORTS,  // two instructions for weights of 4 bits, with sums in 16 bits; eight fit, as 8 × 2 × 15 × 127 < 2^15
    PLAIN,
};
#if defined(__AVX512VNNI__) && !defined(CAROUSEL_PLAIN_INT8)
constexpr Dot DOT = Dot::BYTES;
inline IntegersPart dot(IntegersPart sums, WordsPart weights, WordsPart inputs) {
    return (IntegersPart)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)inputs);
}
#elif defined(__AVX512BW__) && !defined(CAROUSEL_PLAIN_INT8)
constexpr Dot DOT = Dot::SHORTS;
inline IntegersPart dot(IntegersPart sums, WordsPart weights, WordsPart inputs) {
    return (IntegersPart)_mm512_add_epi16((__m512i)sums, _mm512_maddubs_epi16((__m512i)weights, (__m512i)inputs));
}
#elif defined(__AVXVNNI__) && !defined(__AVX512F__) && !defined(CAROUSEL_PLAIN_INT8)
constexpr Dot DOT = Dot::BYTES;
inline IntegersPart dot(IntegersPart sums, WordsPart weights, WordsPart inputs) {
    return (IntegersPart)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)inputs);
}
#elif defined(__AVX2__) && !defined(__AVX512F__) && !defined(CAROUSEL_PLAIN_INT8)
constexpr Dot DOT = Dot::SHORTS;
inline IntegersPart dot(IntegersPart sums, WordsPart weights, WordsPart inputs) {
    return (IntegersPart)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)weights, (__m256i)inputs));
}
#elif defined(__ARM_FEATURE_MATMUL_INT8) && !defined(CAROUSEL_PLAIN_INT8)
constexpr Dot DOT = Dot::BYTES;
inline IntegersPart dot(IntegersPart sums, WordsPart weights, WordsPart inputs) {
    return (IntegersPart)vusdotq_s32((int32x4_t)sums, (uint8x16_t)weights, (int8x16_t)inputs);
}
#elif defined(__ARM_FEATURE_DOTPROD) && !defined(CAROUSEL_PLAIN_INT8)
constexpr Dot DOT = Dot::HALVES;
inline IntegersPart dot(IntegersPart sums, WordsPart weights, WordsPart inputs) {
    return (IntegersPart)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, (int8x16_t)inputs);
}
#else
constexpr Dot DOT = Dot::PLAIN;
inline IntegersPart dot(IntegersPart sums, WordsPart weights, WordsPart inputs) {
    return multiply_add_bytes(sums, weights, inputs);
}
#endif

// Returns sums of `dot` in 32 bits, times a factor.
inline IntegersPart widened(IntegersPart sums, [[maybe_unused]] int16_t factor) {
    if constexpr (DOT != Dot::SHORTS) return sums * factor;
#if defined(__AVX512BW__)
    return (IntegersPart)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(factor));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (IntegersPart)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(factor));
#endif
}

// Call between two operations on a sum. Otherwise GCC unrolls loops over many sums further, and keeps them in memory.
template <typename V>
inline void keep_in_register([[maybe_unused]] V& sum) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(sum));
#elif defined(__AVX__)
    __asm__("" : "+x"(sum));
#endif
}

// How many rows, and registers of columns, have sums that fit in registers.
constexpr int DOT_WIDTH = DOT == Dot::BYTES && PARTS == 1 ? 2 : 1;
constexpr int DOT_ROWS = DOT == Dot::PLAIN ? 2 : DOT == Dot::SHORTS && PARTS == 2 ? 6 : DOT_WIDTH == 2 ? 8 : 12;

}  // namespace carousel
