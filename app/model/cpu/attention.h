// Paged attention: every KV byte of a sequence is read once per tile of query rows; one of blocks that several decoding
// sequences share, once per tile of rows of all of them.
//
// Memory of one layer, in units of vectors.h, so that neither half needs a sum across lanes:
//   keys    [num_blocks][num_kv_heads][key_units][block_size]            a load is one unit of 16 tokens
//   values  [num_blocks][num_kv_heads][block_size / PER_UNIT][value_dim] a load is 16 dimensions of a unit of tokens
//
// In int8, 16 units lie as the first numbers of each, then the second: PER_UNIT times 16 bytes. They are converted to the
// model's type, which is exact, a few groups of tokens at a time. Scores are multiplied by the scale of each key,
// weights by that of each value.
//   scales  [num_blocks][num_kv_heads][2][block_size] of keys, then of values
//
// Everything is accumulated in float32, each row in an order that depends on that row alone: what shares a step or a
// tile with it never changes its bits.
#pragma once

#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "amx.h"
#include "registers.h"
#include "vectors.h"

namespace carousel {

// Query rows of a tile: tokens of one sequence × heads that share a KV head.
constexpr int MAX_ROWS = std::min(12, MOST_SUMS);
// Vectors of which so many rows have sums in registers.
constexpr int width_of(int rows) {
    return MOST_SUMS >= 24 ? (rows <= 4 ? 4 : 2) : (rows == 1 ? 4 : rows <= 3 ? 2 : 1);
}

// library.py declares the same fields, as for all structures that Python passes.
struct AttentionShape {
    int64_t num_heads, num_kv_heads, key_dim, value_dim, block_size;
    float scaling, softcap;  // softcap 0: none
    int64_t sliding_window;  // 0: none
    const float* sinks;      // [num_heads] or null
};

struct Segment {  // consecutive tokens of one sequence in the packed row
    int32_t first_token, num_tokens;
    int32_t start;         // position of the first
    int32_t table_offset;  // of the sequence's block ids in `tables`
};

// Query, key, value or output of packed tokens; the innermost stride is 1.
template <typename T>
struct Heads {
    T* data;
    int64_t token_stride, head_stride;  // in elements

    T* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// Converts LANES units of int8.
inline Words units_of(const int8_t* from, bf16) {
    return (Words)load(from) >> 16 | (Words)load(from + LANES);  // the lower halves are zeros
}
inline Words units_of(const int8_t* from, float) { return (Words)load(from); }

// The KV memory of one layer.
template <typename T>
struct Pages {
    char *keys, *values;
    float* scales;  // null: not in int8
    int64_t num_kv_heads, key_units, value_dim, block_size, unit_bytes;

    Pages(const AttentionShape& shape, void* keys, void* values, void* scales)
        : keys(static_cast<char*>(keys)), values(static_cast<char*>(values)), scales(static_cast<float*>(scales)),
          num_kv_heads(shape.num_kv_heads), key_units(shape.key_dim / PER_UNIT<T>), value_dim(shape.value_dim),
          block_size(shape.block_size), unit_bytes(scales ? PER_UNIT<T> : sizeof(uint32_t)) {}

    // The key units of LANES tokens from `slot` on, `block_size` apart.
    const char* key_group(int32_t block, int64_t slot, int64_t kv_head) const {
        return keys + ((block * num_kv_heads + kv_head) * key_units * block_size + slot) * unit_bytes;
    }
    const char* value_row(int32_t block, int64_t slot, int64_t kv_head) const {
        return values + ((block * num_kv_heads + kv_head) * block_size + slot) / PER_UNIT<T> * value_dim * unit_bytes;
    }
    // Of the keys of the tokens from `slot` on; of their values `block_size` further.
    float* scale_group(int32_t block, int64_t slot, int64_t kv_head) const {
        return scales + (block * num_kv_heads + kv_head) * 2 * block_size + slot;
    }

    void write(int64_t slot, int64_t kv_head, const T* key, const T* value) const {
        const int64_t block = slot / block_size, offset = slot % block_size;
        if (scales) return write_in_int8(int32_t(block), offset, kv_head, key, value);
        auto* column = reinterpret_cast<uint32_t*>(const_cast<char*>(key_group(int32_t(block), offset, kv_head)));
        for (int64_t unit = 0; unit < key_units; ++unit)
            std::memcpy(column + unit * block_size, key + unit * PER_UNIT<T>, sizeof(uint32_t));
        T* row = reinterpret_cast<T*>(const_cast<char*>(value_row(int32_t(block), offset, kv_head)));
        for (int64_t dim = 0; dim < value_dim; ++dim) row[dim * PER_UNIT<T> + offset % PER_UNIT<T>] = value[dim];
    }

  private:
    void write_in_int8(int32_t block, int64_t slot, int64_t kv_head, const T* key, const T* value) const {
        const int64_t group = slot / LANES * LANES, lane = slot % LANES, half = slot % PER_UNIT<T>;
        char* const column = const_cast<char*>(key_group(block, group, kv_head)) + lane;
        char* const row = const_cast<char*>(value_row(block, slot, kv_head)) + half * LANES;
        float* const scale = scale_group(block, slot, kv_head);
        scale[0] = round_to_int8(key, key_units * PER_UNIT<T>, [&](int64_t first, Bytes numbers) {
            for (int64_t at = 0; at < LANES && first + at < key_units * PER_UNIT<T>; ++at) {
                const int64_t unit = (first + at) / PER_UNIT<T>;
                column[unit * block_size * PER_UNIT<T> + at % PER_UNIT<T> * LANES] = numbers[at];
            }
        });
        scale[block_size] = round_to_int8(value, value_dim, [&](int64_t first, Bytes numbers) {
            std::memcpy(row + first * PER_UNIT<T>, &numbers, sizeof(numbers));
        });
    }

    // Calls put(first, numbers) for each LANES of a row; returns their scale. That of a row with a NaN is one too.
    template <typename Put>
    static float round_to_int8(const T* from, int64_t size, Put&& put) {
        Magnitude magnitude;
        for (int64_t at = 0; at < size; at += LANES) magnitude.add(load_some(from + at, size - at));
        const float greatest = magnitude.value(), steps = int8_steps(greatest);
        for (int64_t at = 0; at < size; at += LANES)
            put(at, __builtin_convertvector(nearest(load_some(from + at, size - at) * steps), Bytes));
        return greatest / 127.0f;
    }
};

// Scores of ROWS query rows with GROUPS times LANES tokens; fetches the groups `ahead` of them.
template <typename T, int ROWS, int GROUPS>
inline void score(const uint32_t* query, int64_t key_units, const uint32_t* const* groups, int64_t ahead,
                  int64_t stride, float* scores, int64_t row_stride) {
    const uint32_t *keys[GROUPS], *next[GROUPS];
    for (int group = 0; group < GROUPS; ++group) keys[group] = groups[group], next[group] = groups[ahead + group];
    Vector sums[ROWS][GROUPS] = {};
    add_products<T, ROWS, GROUPS>(sums, keys, next, stride, stride, query, key_units, key_units);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) std::memcpy(scores + row * row_stride, sums[row], sizeof(sums[row]));
}

// Adds the weighted values of some groups, of `num_units` units of tokens each, to WIDTH vectors of each row's sums;
// `mask` zeroes the second token of an incomplete unit. Fetches the groups `ahead` of them.
template <typename T, int ROWS, int WIDTH>
inline void weigh(const uint32_t* weights, int64_t weight_stride, const uint32_t* const* groups, int64_t num_groups,
                  int64_t ahead, int64_t offset, int64_t value_dim, int64_t num_units, uint32_t mask, float* sums) {
    Vector totals[ROWS][WIDTH];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) std::memcpy(totals[row], sums + row * value_dim, sizeof(totals[row]));
    for (int64_t group = 0; group < num_groups; ++group) {
        const uint32_t *values[WIDTH], *next[WIDTH];
        for (int part = 0; part < WIDTH; ++part) {
            values[part] = groups[group] + offset + part * LANES;
            next[part] = groups[group + ahead] + offset + part * LANES;
        }
        add_products<T, ROWS, WIDTH>(totals, values, next, value_dim, value_dim, weights, weight_stride, num_units, mask);
        weights += num_units;
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) std::memcpy(sums + row * value_dim, totals[row], sizeof(totals[row]));
}

// Of keys and values in int8, by a token's position in its sequence; null where they are of the model's type.
struct Scales {
    const float *keys, *values;
};

// Turns the scores of one row, which attends to tokens [first, end) of [begin, padded), into weights relative to the
// greatest; returns the divisor of the weighted sum. Weights are of values in their scales.
template <typename T>
inline float softmax(float* scores, T* weights, int64_t begin, int64_t first, int64_t end, int64_t padded,
                     const AttentionShape& shape, int64_t head, Scales scales) {
    for (int64_t at = begin; at < padded; at += LANES) {
        const Vector scaled = load(scores + at) * shape.scaling;
        store(scales.keys ? scaled * load(scales.keys + at) : scaled, scores + at);
    }
    std::fill(scores + begin, scores + first, -std::numeric_limits<float>::infinity());
    std::fill(scores + end, scores + padded, -std::numeric_limits<float>::infinity());
    if (shape.softcap != 0.0f)
        for (int64_t at = first; at < end; ++at) scores[at] = std::tanh(scores[at] / shape.softcap) * shape.softcap;
    Vector greatest = load(scores + begin);
    for (int64_t at = begin + LANES; at < padded; at += LANES) {
        const Vector other = load(scores + at);
        greatest = greatest > other ? greatest : other;
    }
    float most = shape.sinks ? shape.sinks[head] : -std::numeric_limits<float>::infinity();
    for (int lane = 0; lane < LANES; ++lane) most = std::max(most, greatest[lane]);
    Vector total = {};
    for (int64_t at = begin; at < padded; at += LANES) {
        const Vector weight = exponential(load(scores + at) - most);
        total += weight;
        store(round_to(scales.values ? weight * load(scales.values + at) : weight, T{}), weights + at);
    }
    return sum_of(total) + (shape.sinks ? exponential(Vector{} + (shape.sinks[head] - most))[0] : 0.0f);
}

// The groups of LANES tokens that a thread reads one after the other, and how many groups ahead of their use it fetches
// them.
struct Walk {
    std::vector<const uint32_t*> keys, values;  // in int8: of bytes
    std::vector<const float*> scales;           // of keys and values in int8
    int64_t keys_ahead, values_ahead;

    void clear() {
        keys.clear();
        values.clear();
        scales.clear();
    }
    int64_t size() const { return int64_t(keys.size()); }
    // Tokens [begin, end) of one sequence; `begin` is a multiple of LANES.
    template <typename T>
    void add(const Pages<T>& pages, const int32_t* table, int64_t kv_head, int64_t begin, int64_t end) {
        const int64_t before = size(), num_groups = (end - begin + LANES - 1) / LANES;
        keys.resize(before + num_groups);
        values.resize(before + num_groups);
        const uint32_t **key = keys.data() + before, **value = values.data() + before;
        int64_t slot = begin % pages.block_size;
        for (table += begin / pages.block_size; begin < end; ++table, slot = 0)
            for (; slot < pages.block_size && begin < end; slot += LANES, begin += LANES) {
                *key++ = reinterpret_cast<const uint32_t*>(pages.key_group(*table, slot, kv_head));
                *value++ = reinterpret_cast<const uint32_t*>(pages.value_row(*table, slot, kv_head));
                if (pages.scales) scales.push_back(pages.scale_group(*table, slot, kv_head));
            }
    }
    // While the first `num_shared` tokens are read, which lie in a cache already, the own ones of all sequences are
    // fetched behind them.
    template <typename T>
    void end(int64_t num_shared) {
        constexpr int64_t MOST_AHEAD = 16;  // more in the time of one group would leave the cache before their use
        const int64_t own_ahead = std::min(num_shared / LANES, MOST_AHEAD);
        keys_ahead = std::max<int64_t>(4, own_ahead);
        values_ahead = std::max<int64_t>(PER_UNIT<T>, own_ahead);
        keys.resize(keys.size() + keys_ahead, keys.back());  // so that there is something ahead of the last
        values.resize(values.size() + values_ahead, values.back());
    }
};

struct Scratch {  // of one thread, kept from call to call
    std::vector<uint32_t> query, weights;
    std::vector<Words> converted;  // whole cache lines
    std::vector<float> scores, sums, divisors, key_scales, value_scales;
};

// Calls body(groups, first, count) with some groups at a time, converted from int8: as many as stay in the L1 cache.
// Each has `num_rows` times LANES units, which are `stride` units apart where they come from.
template <typename T, typename Body>
void each_converted(const uint32_t* const* groups, int64_t num_groups, int64_t ahead, int64_t stride, int64_t num_rows,
                    Scratch& scratch, Body&& body) {
    constexpr int64_t MOST = 4;
    scratch.converted.resize(MOST * num_rows);
    const uint32_t* converted[MOST];
    for (int64_t at = 0; at < MOST; ++at)
        converted[at] = reinterpret_cast<const uint32_t*>(scratch.converted.data() + at * num_rows);
    for (int64_t first = 0; first < num_groups; first += MOST) {
        const int64_t count = std::min(MOST, num_groups - first);
        for (int64_t at = 0; at < count; ++at) {
            const auto* from = reinterpret_cast<const int8_t*>(groups[first + at]);
            const auto* next = reinterpret_cast<const int8_t*>(groups[first + at + ahead]);
            for (int64_t row = 0; row < num_rows; ++row) {
                __builtin_prefetch(next + row * stride * PER_UNIT<T>);
                scratch.converted[at * num_rows + row] = units_of(from + row * stride * PER_UNIT<T>, T{});
            }
        }
        body(converted, first, count);
    }
}

template <typename T, int ROWS>
void score_groups(const uint32_t* query, int64_t key_units, const uint32_t* const* groups, int64_t num_groups,
                  int64_t ahead, int64_t stride, float* scores, int64_t row_stride) {
    constexpr int GROUPS = width_of(ROWS);
    for (; num_groups >= GROUPS; num_groups -= GROUPS, groups += GROUPS, scores += GROUPS * LANES)
        score<T, ROWS, GROUPS>(query, key_units, groups, ahead, stride, scores, row_stride);
    for (; num_groups > 0; --num_groups, ++groups, scores += LANES)
        score<T, ROWS, 1>(query, key_units, groups, ahead, stride, scores, row_stride);
}

template <typename T, int ROWS>
void weigh_groups(const uint32_t* weights, int64_t weight_stride, const uint32_t* const* groups, int64_t num_tokens,
                  int64_t ahead, int64_t value_dim, float* sums) {
    constexpr int WIDTH = width_of(ROWS);
    constexpr int64_t UNITS = LANES / PER_UNIT<T>;
    constexpr int64_t GROUPS = 4;  // of which the values stay in the L1 cache for all dimensions
    const auto add = [&](int64_t num_groups, int64_t skipped, int64_t num_units, uint32_t mask) {
        const uint32_t* from = weights + skipped;
        int64_t dim = 0;
        for (; dim + WIDTH * LANES <= value_dim; dim += WIDTH * LANES)
            weigh<T, ROWS, WIDTH>(from, weight_stride, groups, num_groups, ahead, dim + skipped * value_dim, value_dim,
                                  num_units, mask, sums + dim);
        for (; dim < value_dim; dim += LANES)
            weigh<T, ROWS, 1>(from, weight_stride, groups, num_groups, ahead, dim + skipped * value_dim, value_dim,
                              num_units, mask, sums + dim);
    };
    while (num_tokens >= LANES) {
        const int64_t num_groups = std::min<int64_t>(GROUPS, num_tokens / LANES);
        add(num_groups, 0, UNITS, ~0u);
        groups += num_groups;
        weights += num_groups * UNITS;
        num_tokens -= num_groups * LANES;
    }
    if (num_tokens / PER_UNIT<T>) add(1, 0, num_tokens / PER_UNIT<T>, ~0u);
    if (num_tokens % PER_UNIT<T>) add(1, num_tokens / PER_UNIT<T>, 1, 0xffffu);
}

// In the matrix unit tiles 0 to 3 hold sums, 4 queries, 5 weights, 6 keys, 7 values.
inline void configure_amx(int rows) {
    amx::Shapes shapes;
    for (int tile = 0; tile < 5; ++tile) shapes.set(tile, rows);
    shapes.set(5, rows, LANES / PER_UNIT<bf16>);
    shapes.set(6, amx::UNITS);
    shapes.set(7, LANES / PER_UNIT<bf16>);
    amx::configure(shapes);
}

// As `score`, of as many rows as tiles are configured for; one group for each PART.
template <int... PART>
inline void score_in_amx(std::integer_sequence<int, PART...>, const uint32_t* query, int64_t key_units,
                         const uint32_t* const* groups, int64_t ahead, int64_t stride, float* scores,
                         int64_t row_stride) {
    const auto fetch = [&](const uint32_t* group) {
        for (int64_t unit = 0; unit < key_units; ++unit) __builtin_prefetch(group + unit * stride);
    };
    (amx::zero<PART>(), ...);
    (fetch(groups[ahead + PART]), ...);
    for (int64_t unit = 0; unit < key_units; unit += amx::UNITS) {
        amx::load<4>(query + unit, key_units);
        ((amx::load<6>(groups[PART] + unit * stride, stride), amx::dot<bf16, PART, 4, 6>()), ...);
    }
    (amx::store<PART>(scores + PART * LANES, row_stride), ...);
}

template <int ROWS>
void score_groups_in_amx(const uint32_t* query, int64_t key_units, const uint32_t* const* groups, int64_t num_groups,
                         int64_t ahead, int64_t stride, float* scores, int64_t row_stride) {
    configure_amx(ROWS);
    for (; num_groups >= 4; num_groups -= 4, groups += 4, scores += 4 * LANES)
        score_in_amx(std::make_integer_sequence<int, 4>(), query, key_units, groups, ahead, stride, scores, row_stride);
    for (; num_groups > 0; --num_groups, ++groups, scores += LANES)
        score_in_amx(std::make_integer_sequence<int, 1>(), query, key_units, groups, ahead, stride, scores, row_stride);
}

// As `weigh`, of LANES dimensions for each PART. The last group may have fewer tokens: what lies behind them counts as
// zeros.
template <int... PART>
inline void weigh_in_amx(std::integer_sequence<int, PART...>, const uint32_t* weights, int64_t weight_stride,
                         const uint32_t* const* groups, int64_t num_tokens, int64_t ahead, int64_t offset,
                         int64_t value_dim, float* sums) {
    constexpr int64_t UNITS = LANES / PER_UNIT<bf16>;
    (amx::load<PART>(sums + PART * LANES, value_dim), ...);
    for (; num_tokens > 0; num_tokens -= LANES, ++groups, weights += UNITS) {
        const uint32_t* values = *groups + offset;
        for (int64_t unit = 0; unit < UNITS; ++unit)
            (__builtin_prefetch(groups[ahead] + offset + unit * value_dim + PART * LANES), ...);
        amx::load<5>(weights, weight_stride);
        if (num_tokens >= LANES) {
            ((amx::load<7>(values + PART * LANES, value_dim), amx::dot<bf16, PART, 5, 7>()), ...);
            continue;
        }
        uint32_t own[UNITS][LANES];
        const auto copy = [&](const uint32_t* from) {
            for (int64_t unit = 0; unit < UNITS; ++unit, from += value_dim) {
                const int64_t count = num_tokens - unit * PER_UNIT<bf16>;
                const Words kept = load_units(from) & (count > 1 ? ~0u : count == 1 ? 0xffffu : 0u);
                std::memcpy(own[unit], &kept, sizeof(kept));
            }
        };
        ((copy(values + PART * LANES), amx::load<7>(own, LANES), amx::dot<bf16, PART, 5, 7>()), ...);
    }
    (amx::store<PART>(sums + PART * LANES, value_dim), ...);
}

template <int ROWS>
void weigh_groups_in_amx(const uint32_t* weights, int64_t weight_stride, const uint32_t* const* groups,
                         int64_t num_tokens, int64_t ahead, int64_t value_dim, float* sums) {
    configure_amx(ROWS);
    int64_t dim = 0;
    for (; dim + 4 * LANES <= value_dim; dim += 4 * LANES)
        weigh_in_amx(std::make_integer_sequence<int, 4>(), weights, weight_stride, groups, num_tokens, ahead, dim,
                     value_dim, sums + dim);
    for (; dim < value_dim; dim += LANES)
        weigh_in_amx(std::make_integer_sequence<int, 1>(), weights, weight_stride, groups, num_tokens, ahead, dim,
                     value_dim, sums + dim);
}

struct Tile {
    decltype(&score_groups<float, 1>) score;
    decltype(&weigh_groups<float, 1>) weigh;
};

template <typename T, int... BELOW>
constexpr std::array<Tile, MAX_ROWS + 1> tiles_of(std::integer_sequence<int, BELOW...>) {
    return {Tile{}, Tile{score_groups<T, BELOW + 1>, weigh_groups<T, BELOW + 1>}...};
}
template <typename T>
constexpr auto TILES = tiles_of<T>(std::make_integer_sequence<int, MAX_ROWS>());
#define TILE(ROWS) {score_groups_in_amx<ROWS>, weigh_groups_in_amx<ROWS>}
constexpr Tile AMX_TILES[amx::ROWS + 1] = {
    {},      TILE(1), TILE(2),  TILE(3),  TILE(4),  TILE(5),  TILE(6),  TILE(7),  TILE(8),
    TILE(9), TILE(10), TILE(11), TILE(12), TILE(13), TILE(14), TILE(15), TILE(16),
};
#undef TILE

// How query rows are computed together.
struct Rows {
    const Tile* tiles;  // by the number of rows
    int64_t most;
};

template <typename T>
Rows rows_together(const AttentionShape& shape) {
    return amx::fits<T>(shape.key_dim) ? Rows{AMX_TILES, amx::ROWS} : Rows{TILES<T>.data(), MAX_ROWS};
}

// Query rows of one sequence and one KV head, no more than are computed together: each of some tokens with each of some heads.
struct Part {
    int64_t group;                              // of the walk: where its own tokens begin
    int64_t begin;                              // the first of its own tokens
    int64_t first_token, num_tokens, position;  // in the packed row; of the first in its sequence
    int64_t first_head, num_heads;

    int64_t num_rows() const { return num_tokens * num_heads; }
    int64_t length() const { return position + num_tokens; }
    int64_t padded() const { return (length() + LANES - 1) / LANES * LANES; }
    int64_t token(int64_t row) const { return first_token + row / num_heads; }
    int64_t head(int64_t row) const { return first_head + row % num_heads; }
};

// Behind the last token they are 0: its memory may hold anything.
inline Scales scales_by_position(const Walk& walk, const Part& part, int64_t num_shared, int64_t block_size,
                                 Scratch& scratch) {
    scratch.key_scales.resize(part.padded());
    scratch.value_scales.resize(part.padded());
    float *const keys = scratch.key_scales.data(), *const values = scratch.value_scales.data();
    const auto copy = [&](int64_t group, int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; at += LANES, ++group) {
            store(load(walk.scales[group]), keys + at);
            store(load(walk.scales[group] + block_size), values + at);
        }
    };
    copy(0, 0, num_shared);
    copy(part.group, part.begin, part.padded());
    std::fill(values + part.length(), values + part.padded(), 0.0f);
    return {keys, values};
}

// The output of all rows of some parts, each of which attends to the first `num_shared` tokens of the walk and to its
// own. The shared ones are read once for all rows that are computed together.
template <typename T>
void attend_parts(const AttentionShape& shape, const Rows& rows, const Pages<T>& pages, const Walk& walk,
                  const Part* parts, int64_t num_parts, int64_t num_shared, Heads<const T> query, Heads<T> output, Scratch& scratch) {
    int64_t num_rows = 0, stride = 0;
    const auto each_part = [&](auto&& body) {
        int64_t row = 0;
        for (const Part* part = parts; part < parts + num_parts; row += part++->num_rows()) body(*part, row);
    };
    each_part([&](const Part& part, int64_t) {
        num_rows += part.num_rows();
        stride = std::max(stride, part.padded());
    });
    const auto each_tile = [&](auto&& body) {  // of what is shared
        for (int64_t row = 0; num_shared && row < num_rows; row += rows.most)
            body(rows.tiles[std::min(rows.most, num_rows - row)], row);
    };
    scratch.query.resize(num_rows * pages.key_units);
    scratch.scores.resize(num_rows * stride);
    scratch.weights.resize(num_rows * stride / PER_UNIT<T>);
    scratch.sums.assign(num_rows * shape.value_dim, 0.0f);
    scratch.divisors.resize(num_rows);
    const auto query_of = [&](int64_t row) { return scratch.query.data() + row * pages.key_units; };
    const auto scores_of = [&](int64_t row) { return scratch.scores.data() + row * stride; };
    const int64_t weight_stride = stride / PER_UNIT<T>;
    const auto weights_of = [&](int64_t row) { return scratch.weights.data() + row * weight_stride; };
    const auto sums_of = [&](int64_t row) { return scratch.sums.data() + row * shape.value_dim; };

    each_part([&](const Part& part, int64_t first) {
        for (int64_t row = 0; row < part.num_rows(); ++row)
            std::memcpy(query_of(first + row), query.at(part.token(row), part.head(row)), shape.key_dim * sizeof(T));
    });
    const auto score = [&](const Tile& tile, int64_t row, int64_t group, int64_t num_groups, int64_t begin) {
        const uint32_t* const* keys = walk.keys.data() + group;
        float* const to = scores_of(row) + begin;
        if (!pages.scales)
            return tile.score(query_of(row), pages.key_units, keys, num_groups, walk.keys_ahead, pages.block_size, to,
                              stride);
        each_converted<T>(keys, num_groups, walk.keys_ahead, pages.block_size, pages.key_units, scratch,
                          [&](const uint32_t* const* converted, int64_t first, int64_t count) {
                              tile.score(query_of(row), pages.key_units, converted, count, 0, LANES,
                                         to + first * LANES, stride);
                          });
    };
    const auto weigh = [&](const Tile& tile, int64_t row, int64_t group, int64_t num_tokens, int64_t begin) {
        const uint32_t* const* values = walk.values.data() + group;
        const uint32_t* const weights = weights_of(row) + begin / PER_UNIT<T>;
        if (!pages.scales)
            return tile.weigh(weights, weight_stride, values, num_tokens, walk.values_ahead, shape.value_dim,
                              sums_of(row));
        each_converted<T>(values, (num_tokens + LANES - 1) / LANES, walk.values_ahead, LANES,
                          pages.value_dim / PER_UNIT<T>, scratch,
                          [&](const uint32_t* const* converted, int64_t first, int64_t count) {
                              const int64_t before = first * LANES;
                              tile.weigh(weights + before / PER_UNIT<T>, weight_stride, converted,
                                         std::min(count * LANES, num_tokens - before), 0, shape.value_dim,
                                         sums_of(row));
                          });
    };
    each_tile([&](const Tile& tile, int64_t row) { score(tile, row, 0, num_shared / LANES, 0); });
    each_part([&](const Part& part, int64_t row) {
        score(rows.tiles[part.num_rows()], row, part.group, (part.padded() - part.begin) / LANES, part.begin);
    });
    const uint32_t* const* values = walk.values.data() + (num_shared ? 0 : parts->group);
    for (int64_t group = 0; group < walk.values_ahead; ++group)
        for (int64_t at = 0; at < LANES / PER_UNIT<T> * pages.value_dim * pages.unit_bytes; at += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(values[group]) + at);
    const int64_t window = shape.sliding_window;
    each_part([&](const Part& part, int64_t first) {
        const Scales scales = pages.scales ? scales_by_position(walk, part, num_shared, pages.block_size, scratch)
                                           : Scales{};
        for (int64_t row = 0; row < part.num_rows(); ++row) {
            const int64_t end = part.position + row / part.num_heads + 1;
            scratch.divisors[first + row] = softmax(
                scores_of(first + row), reinterpret_cast<T*>(weights_of(first + row)), num_shared ? 0 : part.begin,
                window ? std::max<int64_t>(0, end - window) : 0, end, part.padded(), shape, part.head(row), scales);
        }
    });
    each_tile([&](const Tile& tile, int64_t row) { weigh(tile, row, 0, num_shared, 0); });
    each_part([&](const Part& part, int64_t row) {
        weigh(rows.tiles[part.num_rows()], row, part.group, part.length() - part.begin, part.begin);
    });
    each_part([&](const Part& part, int64_t first) {
        for (int64_t row = 0; row < part.num_rows(); ++row) {
            T* target = output.at(part.token(row), part.head(row));
            for (int64_t dim = 0; dim < shape.value_dim; dim += LANES)
                store(round_to(load(sums_of(first + row) + dim) / scratch.divisors[first + row], T{}), target + dim);
        }
    });
}

// Segments of a step that are attended to together: one, or several of one token each that begin with the same blocks.
struct Group {
    int32_t first, count;  // in the order of `Groups`
    int32_t num_shared;    // tokens in the blocks that all of them begin with
};

// All segments of a step in groups.
class Groups {
  public:
    // most_rows: that are computed together.
    void find(const Segment* segments, int64_t num_segments, const int32_t* tables, const AttentionShape& shape,
              int64_t most_rows, int64_t num_threads) {
        order_.assign(segments, segments + num_segments);
        groups_.clear();
        // Those of several tokens first: they take the most time.
        const auto single = std::stable_partition(order_.begin(), order_.end(),
                                                  [](const Segment& segment) { return segment.num_tokens > 1; });
        std::sort(single, order_.end(), [&](const Segment& left, const Segment& right) {
            const int32_t *one = tables + left.table_offset, *other = tables + right.table_offset;
            return std::lexicographical_compare(one, one + left.start / shape.block_size, other,
                                                other + right.start / shape.block_size);
        });
        const auto num_long = int32_t(single - order_.begin());
        const int64_t most = most_together(shape, most_rows, num_segments - num_long, num_threads);
        for (int32_t at = 0; at < num_segments; at += groups_.back().count)
            groups_.push_back(at < num_long ? Group{at, 1, 0} : group_from(at, most, tables, shape.block_size));
    }

    int64_t size() const { return int64_t(groups_.size()); }
    const Group& operator[](int64_t at) const { return groups_[at]; }
    const Segment* segments(const Group& group) const { return order_.data() + group.first; }

  private:
    // As many as fill a tile, and two at least; fewer where threads would have nothing to do.
    static int64_t most_together(const AttentionShape& shape, int64_t most_rows, int64_t num_sequences,
                                 int64_t num_threads) {
        constexpr int64_t TASKS = 6;  // of each thread at least, so that all end at much the same time
        const int64_t fitting = std::max<int64_t>(2, most_rows * shape.num_kv_heads / shape.num_heads);
        return std::min(fitting, num_sequences * shape.num_kv_heads / (TASKS * num_threads));
    }

    // As many neighbours as save the most reads for each of them.
    Group group_from(int32_t first, int64_t most, const int32_t* tables, int64_t block_size) const {
        const int64_t end = std::min<int64_t>(first + most, order_.size());
        int64_t count = 1, num_shared = 0, common = order_[first].start / block_size;
        for (int64_t at = first + 1; at < end; ++at) {
            const Segment &last = order_[at - 1], &own = order_[at];
            const int32_t *table = tables + last.table_offset, *other = tables + own.table_offset;
            common = std::min(common, own.start / block_size);
            common = std::mismatch(table, table + common, other).first - table;
            if (common == 0) break;
            const int64_t more = at - first + 1;
            if ((more - 1) * common * count < (count - 1) * num_shared * more) continue;
            count = more;
            num_shared = common;
        }
        return {first, int32_t(count), int32_t(num_shared * block_size)};
    }

    std::vector<Segment> order_;
    std::vector<Group> groups_;
};

// The output of a group's tokens for the query heads of one KV head. Its keys and values are written already.
template <typename T>
void attend(const AttentionShape& shape, const Pages<T>& pages, const Groups& groups, const Group& group,
            const int32_t* tables, int64_t kv_head, Heads<const T> query, Heads<T> output) {
    static thread_local Scratch scratch;
    static thread_local Walk walk;
    static thread_local std::vector<Part> parts;
    parts.clear();
    walk.clear();
    const Segment *const first = groups.segments(group), *const end = first + group.count;
    const int64_t window = shape.sliding_window, heads_per_kv = shape.num_heads / shape.num_kv_heads;
    const Rows rows = rows_together<T>(shape);
    const int64_t most_heads = std::min(heads_per_kv, rows.most);  // of one part
    const int64_t most_tokens = std::max<int64_t>(1, rows.most / heads_per_kv);
    // A window that leaves out the first token of one of them may leave out others of the next.
    const bool is_cut = std::any_of(first, end, [&](const Segment& own) { return window && own.start >= window; });
    const int64_t num_shared = is_cut ? 0 : group.num_shared;
    const auto begin = [&](int64_t position) {  // of the own tokens that a row at `position` attends to
        return num_shared ? num_shared : window ? std::max<int64_t>(0, position + 1 - window) / LANES * LANES : 0;
    };
    if (num_shared) walk.add(pages, tables + first->table_offset, kv_head, 0, num_shared);
    for (const Segment* own = first; own < end; ++own) {
        const int64_t group_before = walk.size() - begin(own->start) / LANES;
        walk.add(pages, tables + own->table_offset, kv_head, begin(own->start), own->start + own->num_tokens);
        for (int64_t token = 0; token < own->num_tokens; token += most_tokens)
            for (int64_t head = 0; head < heads_per_kv; head += most_heads) {
                const int64_t position = own->start + token;
                parts.push_back({group_before + begin(position) / LANES, begin(position), own->first_token + token,
                                 std::min(most_tokens, own->num_tokens - token), position,
                                 kv_head * heads_per_kv + head, std::min(most_heads, heads_per_kv - head)});
            }
    }
    walk.end<T>(num_shared);
    const int64_t together = first->num_tokens == 1 ? int64_t(parts.size()) : 1;
    for (int64_t at = 0; at < int64_t(parts.size()); at += together)
        attend_parts(shape, rows, pages, walk, parts.data() + at, together, num_shared, query, output, scratch);
}

}  // namespace carousel
