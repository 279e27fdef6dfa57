// The matrix unit of Intel's CPUs (AMX): eight tiles of up to 16 rows of 64 bytes, multiplied in bfloat16 or int8.
//
// Panels of weights, and a block's keys and values, already have the layout of tiles in units of vectors.h. The matrix
// unit adds in its own order, so either all rows of a matrix use tiles or none do, regardless of their number.
//
// With CAROUSEL_PLAIN_AMX, plain C++ reproduces the instructions bit by bit, to test on machines without AMX. Its value
// replaces the kernel's answer: 0, or the error number of a refusal.
#pragma once

#include <cassert>
#include <type_traits>

#include "vectors.h"
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__) && !defined(CAROUSEL_PLAIN_AMX)
#define CAROUSEL_AMX
#include <cerrno>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace carousel {
namespace amx {

constexpr int ROWS = 16;   // the most rows of a tile
constexpr int UNITS = 16;  // the most units in a row of a tile
constexpr int NOT_BUILT = -1;

// The shapes of a thread's tiles, in the format that the CPU loads.
struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    // Sets a tile's size in rows and units. A tile without rows is unused.
    void set(int tile, int num_rows, int num_units = UNITS) {
        rows[tile] = uint8_t(num_rows);
        row_bytes[tile] = uint16_t(num_rows ? num_units * sizeof(uint32_t) : 0);
    }
};

#if defined(CAROUSEL_AMX) || defined(CAROUSEL_PLAIN_AMX)
constexpr bool IS_BUILT = true;
#else
constexpr bool IS_BUILT = false;
#endif

#ifdef CAROUSEL_AMX

inline int ask_kernel() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 ? 0 : errno;
}
// Intrinsics are avoided, because GCC's stringify tile numbers and do not declare the memory that a load reads.
inline void load_shapes(const Shapes& shapes) { __asm__ volatile("ldtilecfg %0" : : "m"(shapes)); }
inline void drop_shapes() { __asm__ volatile("tilerelease"); }

// Strides are in units.
template <int TILE>
inline void load(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride * 4), "i"(TILE) : "memory");
}
template <int TILE>
inline void store(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride * 4), "i"(TILE) : "memory");
}
template <int TILE>
inline void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(TILE));
}
// sums += left × right, [rows][columns], [rows][units] and [units][columns]. In int8, the right numbers are unsigned.
template <typename T, int SUMS, int LEFT, int RIGHT>
inline void dot() {
    if constexpr (std::is_same_v<T, bf16>)
        __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(LEFT), "i"(RIGHT));
    else
        __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(LEFT), "i"(RIGHT));
}

#else

#ifdef CAROUSEL_PLAIN_AMX
inline int ask_kernel() { return CAROUSEL_PLAIN_AMX; }
#else
inline constexpr int ask_kernel() { return NOT_BUILT; }
#endif

struct Registers {
    Shapes shapes;
    alignas(64) uint32_t tiles[8][ROWS][UNITS];
};
inline thread_local Registers registers;

inline void load_shapes(const Shapes& shapes) { registers.shapes = shapes; }
inline void drop_shapes() { registers.shapes = Shapes(); }

// The matrix unit reads denormal numbers as zeros, and never produces one.
inline Vector flushed(Vector x) {
    const Words bits = (Words)x;
    return (Vector)((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
}

template <int TILE>
inline void zero() {
    assert(registers.shapes.rows[TILE] > 0);
    std::memset(registers.tiles[TILE], 0, sizeof(registers.tiles[TILE]));
}
template <int TILE>
inline void load(const void* from, int64_t stride) {
    zero<TILE>();
    for (int row = 0; row < registers.shapes.rows[TILE]; ++row)
        std::memcpy(registers.tiles[TILE][row], static_cast<const uint32_t*>(from) + row * stride,
                    registers.shapes.row_bytes[TILE]);
}
template <int TILE>
inline void store(void* to, int64_t stride) {
    for (int row = 0; row < registers.shapes.rows[TILE]; ++row)
        std::memcpy(static_cast<uint32_t*>(to) + row * stride, registers.tiles[TILE][row],
                    registers.shapes.row_bytes[TILE]);
}
inline Vector sum_units(Vector sums, const uint32_t* left, const uint32_t (*right)[UNITS], int num_units, bf16) {
    Vector even = {}, odd = {};  // sums of each unit's two products, which are exact for bfloat16
    for (int unit = 0; unit < num_units; ++unit) {
        const Words one = broadcast(left[unit]), other = load_units(right[unit]);
        even = flushed(even + flushed((Vector)(one << 16)) * flushed((Vector)(other << 16)));
        odd = flushed(odd + flushed((Vector)(one & 0xffff0000u)) * flushed((Vector)(other & 0xffff0000u)));
    }
    return flushed(flushed(sums) + flushed(even + odd));
}
inline Vector sum_units(Vector sums, const uint32_t* left, const uint32_t (*right)[UNITS], int num_units, int8_t) {
    Integers total = (Integers)sums;
    for (int unit = 0; unit < num_units; ++unit)
        total = multiply_add_bytes(total, load_units(right[unit]), broadcast(left[unit]));
    return (Vector)total;
}
template <typename T, int SUMS, int LEFT, int RIGHT>
inline void dot() {
    const Shapes& shapes = registers.shapes;
    const auto& tiles = registers.tiles;
    assert(shapes.rows[SUMS] == shapes.rows[LEFT] && shapes.row_bytes[SUMS] == shapes.row_bytes[RIGHT]);
    assert(shapes.row_bytes[LEFT] == shapes.rows[RIGHT] * sizeof(uint32_t) && shapes.rows[RIGHT] > 0);
    for (int row = 0; row < shapes.rows[SUMS]; ++row) {
        uint32_t* const sums = registers.tiles[SUMS][row];
        const Vector total = sum_units((Vector)load_units(sums), tiles[LEFT][row], tiles[RIGHT], shapes.rows[RIGHT], T{});
        std::memcpy(sums, &total, sizeof(total));
    }
}

#endif

// Returns 0 if tiles can be used, else NOT_BUILT or the kernel's error number. Asks the kernel only once, so call it
// before other threads start.
inline int refusal() {
#if defined(CAROUSEL_AMX) || defined(CAROUSEL_PLAIN_AMX)
    static const int answer = ask_kernel();
    return answer;
#else
    return NOT_BUILT;
#endif
}

// Returns whether products of rows of `num_numbers` numbers use tiles.
template <typename T>
inline bool fits(int64_t num_numbers) {
    return std::is_same_v<T, bf16> && num_numbers % (UNITS * PER_UNIT<bf16>) == 0 && refusal() == 0;
}

inline thread_local Shapes configured{0};  // palette 0 means that no tiles are configured

// Sets the shapes of this thread's tiles, unless they are already set.
inline void configure(const Shapes& shapes) {
    if (std::memcmp(&configured, &shapes, sizeof(shapes)) == 0) return;
    configured = shapes;
    load_shapes(configured);
}

// Call at the end of a thread's work: configured tiles slow down thread switches, and other code sets its own shapes.
inline void release() {
    if (configured.palette == 0) return;
    configured.palette = 0;
    drop_shapes();
}

}  // namespace amx
}  // namespace carousel
