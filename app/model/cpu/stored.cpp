// Matrices in the types of a GGUF file: reads ggml's blocks, packs them into strips, and multiplies strips.

#include "stored.h"

#include "thread_pool.h"

using namespace carousel;

namespace carousel {
namespace {

// ------------------------------------------------------------------ ggml's blocks

// ggml's numbers for its types, as in `GGMLQuantizationType` of the gguf package.
enum Type : int64_t { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23 };

struct Format {
    StripKind kind;
    int64_t bytes;  // of a block in the file
};

constexpr Format format_of(int64_t type) {
    switch (type) {
        case Q4_0: return {GROUPS_4, 18};
        case Q4_1: return {GROUPS_4, 20};
        case Q5_0: return {GROUPS_5, 22};
        case Q5_1: return {GROUPS_5, 24};
        case Q8_0: return {GROUPS_8, 34};
        case IQ4_NL: return {GROUPS_8, 18};
        case Q4_K: return {BLOCKS_4, 144};
        case Q5_K: return {BLOCKS_5, 176};
        case Q6_K: return {BLOCKS_6, 210};
        case IQ4_XS: return {BLOCKS_8, 136};
        default: return {PLAIN, 0};
    }
}

constexpr bool has_blocks(StripKind kind) { return kind >= BLOCKS_4; }
constexpr int bits_of(StripKind kind) {
    constexpr int bits[] = {0, 4, 5, 8, 4, 5, 6, 8};
    return bits[kind];
}
constexpr int64_t inputs_of(StripKind kind) { return has_blocks(kind) ? BLOCK : GROUP; }
constexpr int64_t lines_of(StripKind kind) {
    return has_blocks(kind) ? 1 + PAIRS_OF_BLOCK + GROUPS_OF_BLOCK * bits_of(kind) : 1 + bits_of(kind);
}

float from_half(uint16_t bits) {
    uint32_t wide = uint32_t(bits & 0x7fff) << 13;
    float magnitude;
    std::memcpy(&magnitude, &wide, sizeof(magnitude));
    magnitude *= 0x1p112f;
    return bits & 0x8000 ? -magnitude : magnitude;
}

// Returns -(2^power) times a number in float16, which must be able to represent the result.
uint16_t negative_multiple(uint16_t bits, int power) {
    if ((bits & 0x7fff) == 0) return bits;
    int exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
    for (; exponent == 0 && power > 0; --power) {  // the number is denormal
        mantissa <<= 1;
        if (mantissa & 0x400) exponent = 1, mantissa &= 0x3ff;
    }
    return uint16_t(((bits ^ 0x8000) & 0x8000) | std::min(exponent + power * (exponent > 0), 30) << 10 | mantissa);
}

// A column of a ggml block or group, as the lines of a strip store it.
struct Unpacked {
    uint16_t factors[2];
    int8_t bytes[PAIRS_OF_BLOCK][4];
    uint8_t numbers[BLOCK];

    float weight(StripKind kind, int64_t at) const {  // in doubles, so that only the result is rounded
        const double first = from_half(factors[0]), second = from_half(factors[1]), number = numbers[at];
        if (!has_blocks(kind)) return float(first * number + second);
        const int8_t* own = bytes[at / (2 * GROUP)] + at / GROUP % 2 * 2;
        if (kind == BLOCKS_6) own += at / (GROUP / 2) % 2;
        return float(first * own[0] * number - second * own[kind != BLOCKS_6]);
    }
};

constexpr int8_t NONLINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Unpacks sixteen bytes of two numbers each: first inputs 0 to 15, then inputs 16 to 31.
void unpack_halves(const uint8_t* from, uint8_t* to) {
    for (int at = 0; at < 16; ++at) to[at] = from[at] & 15, to[at + 16] = from[at] >> 4;
}

void unpack_nonlinear(const uint8_t* from, uint8_t* to) {
    unpack_halves(from, to);
    for (int at = 0; at < GROUP; ++at) to[at] = uint8_t(NONLINEAR[to[at]] + 128);
}

// Unpacks four times 32 bytes, which store 64 inputs in their lower and upper halves.
void unpack_pairs(const uint8_t* from, uint8_t* to) {
    for (int64_t pair = 0; pair < PAIRS_OF_BLOCK; ++pair, from += GROUP, to += 2 * GROUP)
        for (int64_t at = 0; at < GROUP; ++at) to[at] = from[at] & 15, to[at + GROUP] = from[at] >> 4;
}

void unpack(int64_t type, const uint8_t* from, Unpacked& to) {
    const auto take_factors = [&](int count) { std::memcpy(to.factors, from, count * 2), from += count * 2; };
    const auto center = [&](int power) { to.factors[1] = negative_multiple(to.factors[0], power); };
    switch (type) {
        case Q4_0: case Q4_1: case Q5_0: case Q5_1: {
            const bool has_least = type == Q4_1 || type == Q5_1, has_fifth = type == Q5_0 || type == Q5_1;
            take_factors(has_least ? 2 : 1);
            if (!has_least) center(has_fifth ? 4 : 3);
            uint32_t fifth = 0;
            if (has_fifth) std::memcpy(&fifth, from, sizeof(fifth)), from += sizeof(fifth);
            unpack_halves(from, to.numbers);
            for (int at = 0; at < GROUP; ++at) to.numbers[at] |= (fifth >> at & 1) << 4;
            return;
        }
        case Q8_0:
            take_factors(1), center(7);
            for (int at = 0; at < GROUP; ++at) to.numbers[at] = from[at] ^ 0x80;
            return;
        case IQ4_NL:
            take_factors(1), center(7);
            return unpack_nonlinear(from, to.numbers);
        case Q4_K: case Q5_K: {
            take_factors(2);
            for (int64_t group = 0; group < GROUPS_OF_BLOCK; ++group) {  // six bits each, in 12 bytes
                const uint8_t* own = from + group % 4;
                const bool is_first = group < 4;
                const int scale = is_first ? own[0] & 63 : (own[8] & 15) | own[0] >> 6 << 4;
                const int least = is_first ? own[4] & 63 : own[8] >> 4 | own[4] >> 6 << 4;
                to.bytes[group / 2][group % 2 * 2] = int8_t(scale), to.bytes[group / 2][group % 2 * 2 + 1] = int8_t(least);
            }
            from += 12;
            const uint8_t* fifth = from;
            if (type == Q5_K) from += GROUP;
            unpack_pairs(from, to.numbers);
            if (type == Q5_K)
                for (int64_t group = 0; group < GROUPS_OF_BLOCK; ++group)
                    for (int64_t at = 0; at < GROUP; ++at) to.numbers[group * GROUP + at] |= (fifth[at] >> group & 1) << 4;
            return;
        }
        case Q6_K: {
            const uint8_t *low = from, *high = from + 128, *bytes = from + 192;
            for (uint8_t* own = to.numbers; own < to.numbers + BLOCK; own += 128, low += 64, high += GROUP)
                for (int64_t at = 0; at < GROUP; ++at) {
                    own[at] = uint8_t((low[at] & 15) | (high[at] & 3) << 4);
                    own[at + 32] = uint8_t((low[at + 32] & 15) | (high[at] >> 2 & 3) << 4);
                    own[at + 64] = uint8_t(low[at] >> 4 | (high[at] >> 4 & 3) << 4);
                    own[at + 96] = uint8_t(low[at + 32] >> 4 | high[at] >> 6 << 4);
                }
            std::memcpy(to.bytes, bytes, sizeof(to.bytes));
            from += 208;
            take_factors(1), center(5);
            to.factors[1] ^= 0x8000;
            return;
        }
        case IQ4_XS: {
            take_factors(1), center(7);
            to.factors[1] ^= 0x8000;
            uint16_t high;
            std::memcpy(&high, from, sizeof(high));
            const uint8_t *low = from + 2, *numbers = from + 6;
            for (int64_t group = 0; group < GROUPS_OF_BLOCK; ++group) {
                const int scale = (low[group / 2] >> group % 2 * 4 & 15) | (high >> group * 2 & 3) << 4;
                int8_t* own = to.bytes[group / 2] + group % 2 * 2;
                own[0] = own[1] = int8_t(scale - 32);
                unpack_nonlinear(numbers + group * 16, to.numbers + group * GROUP);
            }
        }
    }
}

// ------------------------------------------------------------------ strips

// Writes the numbers of a column's group to its lines, four inputs at a time.
void put_numbers(int bits, const uint8_t* numbers, uint32_t* lines, int64_t lane) {
    uint32_t units[8], upper[2] = {};
    std::memcpy(units, numbers, sizeof(units));
    for (int unit = 0; unit < 8; ++unit) {
        if (bits == 5) upper[0] |= (units[unit] >> 4 & 0x01010101u) << unit;
        if (bits == 6) upper[unit / 4] |= (units[unit] >> 4 & 0x03030303u) << unit % 4 * 2;
        if (bits == 8) lines[unit * LANES + lane] = units[unit];
    }
    if (bits == 8) return;
    for (int line = 0; line < 4; ++line)
        lines[line * LANES + lane] = (units[line] & 0x0f0f0f0fu) | (units[line + 4] & 0x0f0f0f0fu) << 4;
    for (int line = 4; line < bits; ++line) lines[line * LANES + lane] = upper[line - 4];
}

uint32_t number_in(int bits, const uint32_t* lines, int64_t lane, int at) {
    const int unit = at / 4, byte = at % 4 * 8;
    const auto get = [&](int line, int shift, uint32_t mask) { return lines[line * LANES + lane] >> (byte + shift) & mask; };
    if (bits == 8) return get(unit, 0, 255);
    const uint32_t lower = get(unit % 4, unit / 4 * 4, 15);
    if (bits == 5) return lower | get(4, unit, 1) << 4;
    return bits == 6 ? lower | get(4 + unit / 4, unit % 4 * 2, 3) << 4 : lower;
}

void put_column(StripKind kind, const Unpacked& own, uint32_t* lines, int64_t lane) {
    lines[lane] = own.factors[0] | uint32_t(own.factors[1]) << 16;
    const int64_t num_pairs = has_blocks(kind) ? PAIRS_OF_BLOCK : 0, num_groups = inputs_of(kind) / GROUP;
    for (int64_t pair = 0; pair < num_pairs; ++pair)
        std::memcpy(lines + (1 + pair) * LANES + lane, own.bytes[pair], sizeof(uint32_t));
    for (int64_t group = 0; group < num_groups; ++group)
        put_numbers(bits_of(kind), own.numbers + group * GROUP, lines + (1 + num_pairs + group * bits_of(kind)) * LANES, lane);
}

void take_column(StripKind kind, const uint32_t* lines, int64_t lane, Unpacked& own) {
    own.factors[0] = uint16_t(lines[lane]), own.factors[1] = uint16_t(lines[lane] >> 16);
    const int64_t num_pairs = has_blocks(kind) ? PAIRS_OF_BLOCK : 0;
    for (int64_t pair = 0; pair < num_pairs; ++pair)
        std::memcpy(own.bytes[pair], lines + (1 + pair) * LANES + lane, sizeof(uint32_t));
    for (int64_t at = 0; at < inputs_of(kind); ++at)
        own.numbers[at] = uint8_t(number_in(
            bits_of(kind), lines + (1 + num_pairs + at / GROUP * bits_of(kind)) * LANES, lane, int(at % GROUP)));
}

// ------------------------------------------------------------------ products

#if defined(__AVX512BW__)
inline IntegersPart pair_products(WordsPart left, WordsPart right) {
    return (IntegersPart)_mm512_madd_epi16((__m512i)left, (__m512i)right);
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
inline IntegersPart pair_products(WordsPart left, WordsPart right) {
    return (IntegersPart)_mm256_madd_epi16((__m256i)left, (__m256i)right);
}
#else
inline IntegersPart pair_products(WordsPart left, WordsPart right) {
    const auto low = [](WordsPart x) { return (IntegersPart)(x << 16) >> 16; };
    const auto high = [](WordsPart x) { return (IntegersPart)x >> 16; };
    return low(left) * low(right) + high(left) * high(right);
}
#endif

// Returns the factor for `scaled` from one half of pairs of int16.
template <int HALF>
inline WordsPart factor_of(WordsPart pairs) {
    if constexpr (DOT == Dot::SHORTS)
        return HALF ? pairs >> 16 | (pairs & 0xffff0000u) : pairs << 16 | (pairs & 0xffffu);
    else
        return (WordsPart)(HALF ? (IntegersPart)pairs >> 16 : (IntegersPart)(pairs << 16) >> 16);
}

// Returns sums of `dot` in 32 bits, times the result of `factor_of`.
inline IntegersPart scaled(IntegersPart sums, WordsPart factor) {
    if constexpr (DOT == Dot::SHORTS)
        return pair_products((WordsPart)sums, factor);
    else
        return sums * (IntegersPart)factor;
}

inline WordsPart load_part(const uint32_t* from) {
    WordsPart words;
    std::memcpy(&words, from, sizeof(words));
    return words;
}

// Converts float16 in the lower half of each word to float32. Scales are often denormal, and some CPUs
// compute slowly with denormal numbers.
inline FloatPart from_halves(WordsPart bits) {
#if defined(__AVX512F__)
    return (FloatPart)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)bits));
#elif defined(__F16C__)
    const __m256i lower = _mm256_and_si256((__m256i)bits, _mm256_set1_epi32(0xffff));
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(lower), _mm256_extracti128_si256(lower, 1));
    return (FloatPart)_mm256_cvtph_ps(halves);
#else
    const WordsPart magnitude = bits & 0x7fffu;
    const FloatPart small = __builtin_convertvector((IntegersPart)magnitude, FloatPart) * 0x1p-24f;
    const WordsPart wide = (magnitude << 13) + (112u << 23);
    const WordsPart found = magnitude < 0x400u ? (WordsPart)small : wide;
    return (FloatPart)(found | (bits & 0x8000u) << 16);
#endif
}

// Bytes 0 and 2 of each word as int16, and bytes 1 and 3.
struct BytePairs {
    WordsPart even, odd;
};
inline BytePairs bytes_of(const uint32_t* from) {
    typedef int16_t Shorts __attribute__((vector_size(sizeof(WordsPart))));
    const auto bytes = (Shorts)load_part(from);
    return {(WordsPart)(bytes << 8 >> 8), (WordsPart)(bytes >> 8)};
}

// Returns the numbers of unit UNIT of a group for each column.
template <int BITS, int UNIT>
inline WordsPart numbers_at(const uint32_t* lines) {
    if constexpr (BITS == 8) return load_part(lines + UNIT * LANES);
    const WordsPart both = load_part(lines + UNIT % 4 * LANES);
    WordsPart numbers = (UNIT < 4 ? both : both >> 4) & 0x0f0f0f0fu;
    if constexpr (BITS == 5) {
        const WordsPart upper = load_part(lines + 4 * LANES);
        numbers |= (UNIT < 4 ? upper << (4 - UNIT % 4) : upper >> UNIT % 4) & 0x10101010u;
    }
    if constexpr (BITS == 6) {
        constexpr int SHIFT = 4 - UNIT % 4 * 2;
        const WordsPart upper = load_part(lines + (4 + UNIT / 4) * LANES);
        numbers |= (SHIFT < 0 ? upper >> (SHIFT < 0 ? -SHIFT : 0) : upper << (SHIFT < 0 ? 0 : SHIFT)) & 0x30303030u;
    }
    return numbers;
}

// How many units' products, of at most 2 × (2^BITS - 1) × 127, fit into sums of 16 bits.
template <int BITS>
constexpr int TOGETHER = DOT != Dot::SHORTS || BITS == 4 || BITS == 8 ? 8 : BITS == 5 ? 4 : 2;

// Whether not even one product fits, so that the two halves of weights are summed separately.
template <int BITS>
constexpr bool IN_HALVES = BITS == 8 && (DOT == Dot::HALVES || DOT == Dot::SHORTS);

// The addresses of ROWS rows of inputs. One address serves four rows: GCC would use one per row, which is more than
// there are registers.
template <int ROWS>
struct Inputs {
    const uint32_t* fours[(ROWS + 3) / 4];
    int64_t stride, stride_of_3;

    Inputs(const int8_t* numbers, int64_t size) : stride(size / PER_UNIT<int8_t>), stride_of_3(3 * stride) {
        for (const uint32_t*& four : fours)
            four = reinterpret_cast<const uint32_t*>(numbers) + (&four - fours) * 4 * stride;
    }
    void keep() {
        for (const uint32_t*& four : fours) __asm__("" : "+r"(four));
        __asm__("" : "+r"(stride), "+r"(stride_of_3));
    }
    void move(int64_t units) {
        for (const uint32_t*& four : fours) four += units;
    }
    WordsPart at(int row, int unit) const {
        return WordsPart{} + fours[row / 4][(row % 4 == 3 ? stride_of_3 : row % 4 * stride) + unit];
    }
};

// Adds the products of a group's unit UNIT.
template <int BITS, int UNIT, int SUMS, int ROWS>
inline __attribute__((always_inline)) void add_unit(IntegersPart (&own)[SUMS][ROWS], const uint32_t* lines,
                                                    Inputs<ROWS>& inputs) {
    inputs.keep();
    WordsPart numbers[SUMS] = {numbers_at<BITS, UNIT>(lines)};
    if constexpr (SUMS == 2) numbers[1] = numbers[0] >> 4 & 0x0f0f0f0fu, numbers[0] &= 0x0f0f0f0fu;
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) {
        const WordsPart input = inputs.at(row, UNIT);
#pragma GCC unroll 2
        for (int half = 0; half < SUMS; ++half) {
            own[half][row] = dot(own[half][row], numbers[half], input);
            if constexpr (DOT == Dot::SHORTS) keep_in_register(own[half][row]);
        }
    }
}

// sums[row] += factor × products of a group's units FIRST to END.
template <int BITS, int FIRST, int END, int ROWS>
inline __attribute__((always_inline)) void add_units(IntegersPart (&sums)[ROWS], const uint32_t* lines,
                                                     Inputs<ROWS>& inputs, WordsPart factor) {
    constexpr int SUMS = IN_HALVES<BITS> ? 2 : 1;
    constexpr int LAST = FIRST + TOGETHER<BITS> < END ? FIRST + TOGETHER<BITS> : END;
    IntegersPart own[SUMS][ROWS] = {};
    add_unit<BITS, FIRST>(own, lines, inputs);
    add_unit<BITS, FIRST + 1>(own, lines, inputs);
    if constexpr (FIRST + 2 < LAST) add_unit<BITS, FIRST + 2>(own, lines, inputs);
    if constexpr (FIRST + 2 < LAST) add_unit<BITS, FIRST + 3>(own, lines, inputs);
    if constexpr (FIRST + 4 < LAST) add_unit<BITS, FIRST + 4>(own, lines, inputs);
    if constexpr (FIRST + 4 < LAST) add_unit<BITS, FIRST + 5>(own, lines, inputs);
    if constexpr (FIRST + 4 < LAST) add_unit<BITS, FIRST + 6>(own, lines, inputs);
    if constexpr (FIRST + 4 < LAST) add_unit<BITS, FIRST + 7>(own, lines, inputs);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) {
        sums[row] += scaled(own[0][row], factor);
        if constexpr (SUMS == 2) sums[row] += scaled(own[1][row], factor) * 16;
    }
    if constexpr (LAST < END) add_units<BITS, LAST, END>(sums, lines, inputs, factor);
}

template <int ROWS>
inline void store_totals(const FloatPart (&totals)[ROWS][PARTS], int half, Vector (*results)[2]) {
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; ++part)
            std::memcpy(reinterpret_cast<FloatPart*>(&results[row][half]) + part, &totals[row][part], sizeof(FloatPart));
}

constexpr int64_t AHEAD = 32;  // lines to prefetch; they may belong to the next strip

template <int BITS, int ROWS>
[[gnu::noinline]] void multiply_groups(const QuantisedRows& inputs, int64_t num_inputs, const uint32_t* lines, int half,
                                       Vector (*results)[2]) {
    const int64_t groups = num_inputs / GROUP;
    Inputs<ROWS> rows(inputs.numbers, num_inputs);
    const WordsPart one = factor_of<0>(WordsPart{} + 1u);
    FloatPart totals[ROWS][PARTS] = {};
    for (int64_t group = 0; group < groups; ++group, rows.move(GROUP / PER_UNIT<int8_t>), lines += (1 + BITS) * LANES) {
        for (int part = 0; part < PARTS; ++part) {
            const uint32_t* from = lines + part * PART_LANES;
            for (int line = part; line <= BITS; line += PARTS) __builtin_prefetch(lines + (AHEAD + line) * LANES, 0, 2);
            IntegersPart sums[ROWS] = {};
            add_units<BITS, 0, 8>(sums, from + LANES, rows, one);
            const WordsPart pair = load_part(from);
            const FloatPart scale = from_halves(pair), least = from_halves(pair >> 16);
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; ++row) {
                totals[row][part] += least * inputs.sums[row * groups + group];
                totals[row][part] += __builtin_convertvector(sums[row], FloatPart) * (scale * inputs.scales[row * groups + group]);
            }
        }
    }
    store_totals<ROWS>(totals, half, results);
}

template <int BITS, int ROWS>
[[gnu::noinline]] void multiply_blocks(const BlockRows& inputs, int64_t num_inputs, const uint32_t* lines, int half,
                                       Vector (*results)[2]) {
    constexpr bool HAS_HALVES = BITS == 6;  // of a group, each of which has a scale
    constexpr int64_t LINES = 1 + PAIRS_OF_BLOCK + GROUPS_OF_BLOCK * BITS;
    const int64_t blocks = num_inputs / BLOCK;
    FloatPart totals[ROWS][PARTS] = {};
    for (int64_t block = 0; block < blocks; ++block, lines += LINES * LANES) {
        for (int part = 0; part < PARTS; ++part) {
            const uint32_t *from = lines + part * PART_LANES, *numbers = from + (1 + PAIRS_OF_BLOCK) * LANES;
            Inputs<ROWS> rows(inputs.numbers, num_inputs);
            rows.move(block * (BLOCK / PER_UNIT<int8_t>));
            IntegersPart sums[ROWS] = {}, leasts[ROWS] = {};
            for (int64_t pair = 0; pair < PAIRS_OF_BLOCK; ++pair) {
                const auto [even, odd] = bytes_of(from + (1 + pair) * LANES);
                const auto add_group = [&](auto which) {
                    constexpr int WHICH = decltype(which)::value;
                    for (int line = part; line < BITS; line += PARTS) __builtin_prefetch(numbers + (AHEAD + line) * LANES, 0, 2);
                    if constexpr (HAS_HALVES) {
                        add_units<BITS, 0, 4>(sums, numbers, rows, factor_of<WHICH>(even));
                        add_units<BITS, 4, 8>(sums, numbers, rows, factor_of<WHICH>(odd));
                    } else {
                        add_units<BITS, 0, 8>(sums, numbers, rows, factor_of<WHICH>(even));
                    }
                    numbers += BITS * LANES, rows.move(GROUP / PER_UNIT<int8_t>);
                };
                add_group(std::integral_constant<int, 0>{});
                add_group(std::integral_constant<int, 1>{});
            }
            for (int64_t pair = 0; pair < PAIRS_OF_BLOCK; ++pair) {
                const auto [even, odd] = bytes_of(from + (1 + pair) * LANES);
#pragma GCC unroll 16
                for (int row = 0; row < ROWS; ++row) {
                    const uint32_t* words = inputs.sums + (row * blocks + block) * SUM_WORDS + pair * 3;
                    if constexpr (HAS_HALVES)
                        leasts[row] += pair_products(even, WordsPart{} + words[0]) + pair_products(odd, WordsPart{} + words[1]);
                    else
                        leasts[row] += pair_products(odd, WordsPart{} + words[2]);
                }
            }
            const WordsPart factors = load_part(from);
            const FloatPart scale = from_halves(factors), least = from_halves(factors >> 16);
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; ++row) {
                const float own = inputs.scales[row * blocks + block];
                totals[row][part] -= __builtin_convertvector(leasts[row], FloatPart) * (least * own);
                totals[row][part] += __builtin_convertvector(sums[row], FloatPart) * (scale * own);
            }
        }
    }
    store_totals<ROWS>(totals, half, results);
}

template <int ROWS>
void multiply_rows(StripKind kind, const uint32_t* from, const StoredRows& inputs, int64_t num_inputs, int half,
                   Vector (*sums)[2]) {
    switch (kind) {
        case GROUPS_4: return multiply_groups<4, ROWS>(inputs.groups, num_inputs, from, half, sums);
        case GROUPS_5: return multiply_groups<5, ROWS>(inputs.groups, num_inputs, from, half, sums);
        case GROUPS_8: return multiply_groups<8, ROWS>(inputs.groups, num_inputs, from, half, sums);
        case BLOCKS_4: return multiply_blocks<4, ROWS>(inputs.blocks, num_inputs, from, half, sums);
        case BLOCKS_5: return multiply_blocks<5, ROWS>(inputs.blocks, num_inputs, from, half, sums);
        case BLOCKS_6: return multiply_blocks<6, ROWS>(inputs.blocks, num_inputs, from, half, sums);
        case BLOCKS_8: return multiply_blocks<8, ROWS>(inputs.blocks, num_inputs, from, half, sums);
        case PLAIN: return;
    }
}

}  // namespace

void multiply_strip(const Strip& strip, const uint32_t* from, int rows, const StoredRows& inputs, int64_t num_inputs,
                    int half, Vector (*sums)[2]) {
    const auto kind = StripKind(strip.kind);
    // Only some numbers of rows have code, because each takes seconds to compile. Other numbers compute extra rows.
#define CASE(ROWS)                                   \
    if constexpr (ROWS <= STRIP_ROWS)                \
        if (rows <= ROWS) return multiply_rows<ROWS>(kind, from, inputs, num_inputs, half, sums);
    CASE(1) CASE(2) CASE(4) CASE(6) CASE(8) CASE(12)
#undef CASE
}

void read_strip(const Strip& strip, const uint32_t* from, int64_t lane, int64_t num_inputs, float* to) {
    const auto kind = StripKind(strip.kind);
    Unpacked own;
    for (int64_t first = 0; first < num_inputs; first += inputs_of(kind), from += lines_of(kind) * LANES) {
        take_column(kind, from, lane, own);
        for (int64_t at = 0; at < inputs_of(kind); ++at) to[first + at] = own.weight(kind, at);
    }
}

}  // namespace carousel

#pragma GCC visibility push(default)
extern "C" {

// The source of a strip: up to LANES rows of a file's tensor.
struct StripSource {
    int64_t type, address, num_rows, line;
};

// Packs rows of `num_inputs` weights into the strips of a matrix. Missing columns are filled with zeros.
void carousel_pack_stored(void* threads, const StripSource* sources, int64_t num_strips, int64_t num_inputs,
                          uint32_t* matrix) {
    ThreadPool& members = *static_cast<ThreadPool*>(threads);
    members.run([&] {
        members.share(num_strips, [&](int64_t at) {
            const StripSource& source = sources[at];
            const Format format = format_of(source.type);
            reinterpret_cast<Strip*>(matrix)[at] = {format.kind, uint32_t(source.line)};
            uint32_t* to = matrix + source.line * LANES;
            const int64_t num_blocks = num_inputs / inputs_of(format.kind), lines = lines_of(format.kind);
            std::memset(to, 0, num_blocks * lines * LANES * sizeof(uint32_t));
            const auto* from = reinterpret_cast<const uint8_t*>(source.address);
            Unpacked own;
            for (int64_t lane = 0; lane < source.num_rows; ++lane)
                for (int64_t block = 0; block < num_blocks; ++block, from += format.bytes) {
                    unpack(source.type, from, own);
                    put_column(format.kind, own, to + block * lines * LANES, lane);
                }
        });
    });
}

// Returns how inputs for matrices of a type are rounded, IN_GROUPS or IN_BLOCKS.
int64_t carousel_stored_form(int64_t type) { return has_blocks(format_of(type).kind) ? IN_BLOCKS : IN_GROUPS; }

// Returns the number of lines of a strip, or -1 for an unsupported type.
int64_t carousel_stored_lines(int64_t type, int64_t num_inputs) {
    const StripKind kind = format_of(type).kind;
    return kind == PLAIN ? -1 : num_inputs / inputs_of(kind) * lines_of(kind);
}

// Dequantises consecutive blocks.
void carousel_dequantise(void* threads, int64_t type, const uint8_t* from, int64_t num_weights, float* to) {
    constexpr int64_t PIECE = 256;  // blocks
    const Format format = format_of(type);
    const int64_t size = inputs_of(format.kind), num_blocks = num_weights / size;
    ThreadPool& members = *static_cast<ThreadPool*>(threads);
    members.run([&] {
        members.share((num_blocks + PIECE - 1) / PIECE, [&](int64_t piece) {
            Unpacked own;
            for (int64_t block = piece * PIECE; block < std::min(num_blocks, (piece + 1) * PIECE); ++block) {
                unpack(type, from + block * format.bytes, own);
                for (int64_t at = 0; at < size; ++at) to[block * size + at] = own.weight(format.kind, at);
            }
        });
    });
}

}
#pragma GCC visibility pop
