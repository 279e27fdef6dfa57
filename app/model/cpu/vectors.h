// Vectors of 16 lanes, and the multiplication on which all code here is based.
//
// A *unit* is 32 bits of numbers that are multiplied by those of another unit and summed into 32 bits: one float32 or
// two bfloat16 into a float, four int8 into an integer. Matrices and KV memory are laid out in units, so that the same
// code supports all types.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace carousel {

constexpr int LANES = 16;

using f32 = float;
struct bf16 {
    uint16_t bits;
};

// The compiler's vectors, which occupy one AVX-512 register, or two or four smaller ones.
typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));
typedef uint8_t UnsignedBytes __attribute__((vector_size(LANES)));

template <typename T>
constexpr int PER_UNIT = int(sizeof(uint32_t) / sizeof(T));  // numbers in a unit

inline Words load_units(const uint32_t* from) {
    Words result;
    std::memcpy(&result, from, sizeof(result));
    return result;
}

inline Vector load(const float* from) {
    Vector result;
    std::memcpy(&result, from, sizeof(result));
    return result;
}
inline Vector load(const bf16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof(halves));
    return (Vector)(__builtin_convertvector(halves, Words) << 16);
}

// Round to the nearest number of the type, ties to even. A NaN stays a NaN.
inline Vector round_to(Vector x, float) { return x; }
inline Vector round_to(Vector x, bf16) {
    const Words bits = (Words)x;
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    const Words kept = (bits & 0xffff0000u) | 0x00400000u;
    return (Vector)((bits & 0x7fffffffu) > 0x7f800000u ? kept : rounded);
}

inline Vector load(const int8_t* from) {
#ifdef __AVX512F__
    return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
    typedef int16_t Wider __attribute__((vector_size(LANES * 2)));  // GCC converts in larger steps lane by lane
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof(bytes));
    return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(bytes, Wider), Integers), Vector);
#endif
}

inline void store(Vector x, float* to) { std::memcpy(to, &x, sizeof(x)); }
inline void store(Vector x, bf16* to) {  // exact only for results of `round_to`
    const Halves halves = __builtin_convertvector((Words)x >> 16, Halves);
    std::memcpy(to, &halves, sizeof(halves));
}

// Like store(round_to(x, T{}), to), but denormal numbers may become 0.
inline void store_rounded(Vector x, float* to) { store(x, to); }
inline void store_rounded(Vector x, bf16* to) {
#ifdef __AVX512BF16__
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(to, &halves, sizeof(halves));
#else
    store(round_to(x, bf16{}), to);
#endif
}

// Loads only the first `count` numbers. The other lanes are 0.
template <typename T>
inline Vector load_some(const T* from, int64_t count) {
    if (count >= LANES) return load(from);
    T numbers[LANES] = {};
    std::memcpy(numbers, from, count * sizeof(T));
    return load(numbers);
}
template <typename T>
inline void store_some(Vector x, T* to, int64_t count) {
    if (count >= LANES) return store(x, to);
    T numbers[LANES];
    store(x, numbers);
    std::memcpy(to, numbers, count * sizeof(T));
}

inline Words broadcast(uint32_t unit) {
    return Words{} + unit;
}

// Returns sums + four unsigned weights × four signed inputs, for vectors of any size.
template <typename I, typename W>
inline I multiply_add_bytes(I sums, W weights, W inputs) {
    typedef int16_t Shorts __attribute__((vector_size(sizeof(W))));
    // A product fits into 16 bits, but not the sum of two.
    const auto widened = [](Shorts products) { return ((I)products << 16 >> 16) + ((I)products >> 16); };
    const Shorts even = (Shorts)(weights & 0x00ff00ffu) * ((Shorts)inputs << 8 >> 8);
    const Shorts odd = (Shorts)(weights >> 8 & 0x00ff00ffu) * ((Shorts)inputs >> 8);
    return sums + widened(even) + widened(odd);
}

// Exchanges the numbers of lanes that are DISTANCE apart, which must be a power of two.
template <int DISTANCE, typename V>
inline V swapped(V x) {
#ifdef __clang__
    V result;
    for (int lane = 0; lane < LANES; ++lane) result[lane] = x[lane ^ DISTANCE];
    return result;
#else
    return __builtin_shuffle(x, Integers{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} ^ DISTANCE);
#endif
}

// Returns whether a comparison is true in any lane.
inline bool any(Integers mask) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    int32_t found = 0;
    for (int lane = 0; lane < LANES; ++lane) found |= mask[lane];
    return found != 0;
#endif
}

// Returns the greater number in each lane, or the one of `right` if either is a NaN.
inline Vector greater_of(Vector left, Vector right) {
#ifdef __AVX512F__
    return (Vector)_mm512_max_ps((__m512)left, (__m512)right);
#else
    return left > right ? left : right;
#endif
}

// Returns the greatest number in any lane.
inline float greatest_of(Vector x) {
    x = greater_of(x, swapped<8>(x)), x = greater_of(x, swapped<4>(x)), x = greater_of(x, swapped<2>(x));
    return greater_of(x, swapped<1>(x))[0];
}
inline float sum_of(Vector x) {
    x += swapped<8>(x), x += swapped<4>(x), x += swapped<2>(x);
    return (x + swapped<1>(x))[0];
}

// Returns the index of the greatest number, the first one if several are equal. Ignores NaNs.
inline int64_t first_greatest(const float* from, int64_t count) {
    Vector greatest = Vector{} - INFINITY;
    Integers where = {}, lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES) {
        const Vector numbers = load(from + at);
        const auto is_greater = numbers > greatest;
        greatest = is_greater ? numbers : greatest;
        where = is_greater ? lane + int32_t(at) : where;
    }
    int64_t best = where[0];
    float most = greatest[0];
    for (int i = 1; i < LANES; ++i)
        if (greatest[i] > most || (greatest[i] == most && where[i] < best)) most = greatest[i], best = where[i];
    for (; at < count; ++at)
        if (from[at] > most) most = from[at], best = at;
    return best;
}

// 1.5 × 2^23. Adding it to a float rounds the float and leaves an integer in its low bits.
constexpr float ROUNDER = 12582912.0f;

// Returns the nearest integers, ties to even.
inline Integers nearest(Vector x) { return (Integers)(x + ROUNDER) - 0x4b400000; }  // the bits of `ROUNDER`

// The greatest magnitude of the numbers added so far. A NaN counts as the greatest.
struct Magnitude {
    Integers greatest = {};

    void add(Vector x) { merge((Integers)x & 0x7fffffff); }
    float value() {
        merge(swapped<8>(greatest)), merge(swapped<4>(greatest)), merge(swapped<2>(greatest));
        merge(swapped<1>(greatest));
        return ((Vector)greatest)[0];
    }
    void merge(Integers other) { greatest = other > greatest ? other : greatest; }
};

// Returns the factor that maps numbers up to this magnitude to int8, or 0 for a NaN.
inline float int8_steps(float magnitude) { return magnitude > 1e-30f ? 127.0f / magnitude : 0.0f; }

constexpr float LOG2_E = 1.44269504088896341f;

// Returns 2^x for x < 127, to about 2 ulp (the polynomial of Cephes' exp2f); 0 far below -126.
inline Vector power_of_two(Vector x) {
#ifdef __AVX512F__
    x = greater_of(Vector{} - 200.0f, x);  // -infinity has no remainder
    const Vector n = (Vector)_mm512_roundscale_ps((__m512)x, 0);
#else
    const Vector shift = Vector{} + ROUNDER, n = (x + shift) - shift;
#endif
    const Vector r = x - n;
    Vector p = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
    p = p * r + 9.618437357674640e-3f;
    p = p * r + 5.550332471162809e-2f;
    p = p * r + 2.402264791363012e-1f;
    p = p * r + 6.931472028550421e-1f;
    p = p * r + 1.0f;
#ifdef __AVX512F__
    return (Vector)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const Vector scale = (Vector)((__builtin_convertvector(n, Integers) + 127) << 23);
    return x < Vector{} - 126.0f ? Vector{} : p * scale;
#endif
}

// Returns e^x for x < 88, to about 2 ulp (the polynomial of Cephes' expf); 0 below -87. V: floats of any vector size.
template <typename V>
inline V exponential(V x) {
    using Whole = decltype(x < x);
    const V floor = V{} - 87.0f, shift = V{} + ROUNDER;
    const V n = (x * LOG2_E + shift) - shift;
    V r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const V scale = (V)((__builtin_convertvector(n, Whole) + 127) << 23);
    return x < floor ? V{} : p * scale;
}

}  // namespace carousel
