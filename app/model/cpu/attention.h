// Paged attention. Every KV byte of a sequence is read once per tile of query rows. If several decoding sequences share
// blocks, the rows of a tile come from all of them.
//
// The layout of a layer's memory, in units of vectors.h. Neither keys nor values need a sum across lanes:
//   keys    [num_blocks][heads_in_block][key_units][block_size]            a load is one unit of 16 tokens
//   values  [num_blocks][heads_in_block][block_size / PER_UNIT][value_dim] a load is 16 dimensions of a unit of tokens
//
// In int8, 16 units occupy PER_UNIT times 16 bytes: the first numbers of all units, then the second ones. They are
// converted exactly to the model's type, for a few groups of tokens or for a whole piece, if a prompt has many rows.
// Scores are multiplied by each key's scale, and weights by each value's scale.
//   scales  [num_blocks][scales_in_block][2][block_size] of keys, then of values
//
// Everything is summed in float32, in an order that depends only on the row itself, so other rows in a step or a tile
// never change its bits. A row attends to a sequence piece by piece, as in FlashAttention (Dao et al., arXiv
// 2205.14135). Unlike in Flash-Decoding (Dao et al., 2023), the borders of pieces do not depend on the number of
// threads. Pieces are merged in the order of positions.
#pragma once

#include <array>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "amx.h"
#include "registers.h"
#include "thread_pool.h"
#include "vectors.h"

namespace carousel {

// The most query rows of a tile, which are tokens of one sequence × heads that share a KV head.
constexpr int MAX_ROWS = std::min(12, MOST_SUMS);
// Tokens in a piece. Each piece starts by waiting for memory, so smaller pieces wait more often.
#ifdef CAROUSEL_PIECE
constexpr int64_t PIECE = CAROUSEL_PIECE;  // for tests
#else
constexpr int64_t PIECE = 2048;
#endif
// Returns the number of vectors whose sums fit into registers with this number of rows.
constexpr int width_of(int rows) {
    return MOST_SUMS >= 24 ? (rows <= 4 ? 4 : 2) : (rows == 1 ? 4 : rows <= 3 ? 2 : 1);
}

// layouts.h and library.py must declare the same fields, as for all structures that Python passes.
struct AttentionShape {
    int64_t num_heads, num_kv_heads, key_dim, value_dim, block_size;
    float scaling, softcap;  // softcap 0 for none
    int64_t sliding_window;  // 0 for none
    const float* sinks;      // [num_heads] or null
    // The distance between blocks in heads of this shape, and in heads with scales. Layers of several shapes may share
    // a block, which then has as many scales as the shape with the most heads.
    int64_t heads_in_block, scales_in_block;
    int64_t is_latent;  // whether a key's first `value_dim` numbers are its value, stored only once
};

struct Strides {  // in elements; the innermost stride is 1
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
};

struct Segment {  // consecutive tokens of one sequence in the packed row
    int32_t first_token, num_tokens;
    int32_t start;         // position of the first token
    int32_t table_offset;  // where the sequence's block ids start in `tables`
};

// The queries, keys, values or outputs of packed tokens. The innermost stride is 1.
template <typename T>
struct Heads {
    T* data;
    int64_t token_stride, head_stride;  // in elements

    T* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// Converts LANES units from int8.
inline Words units_of(const int8_t* from, bf16) {
    return (Words)load(from) >> 16 | (Words)load(from + LANES);  // the lower halves are zeros
}
inline Words units_of(const int8_t* from, float) { return (Words)load(from); }
// Converts `num_rows` times LANES units, `stride` units apart. Prefetches as many from `next` on.
template <typename T>
void convert_group(const uint32_t* group, const uint32_t* next, int64_t stride, int64_t num_rows, Words* to) {
    const auto *from = reinterpret_cast<const int8_t*>(group), *later = reinterpret_cast<const int8_t*>(next);
    for (int64_t row = 0; row < num_rows; ++row) {
        __builtin_prefetch(later + row * stride * PER_UNIT<T>);
        to[row] = units_of(from + row * stride * PER_UNIT<T>, T{});
    }
}

// A layer's KV memory.
template <typename T>
struct Pages {
    char *keys, *values;
    float* scales;  // null unless the type is int8
    int64_t heads_in_block, scales_in_block, latent_units, key_units;  // key_units without the latent's
    int64_t value_dim, block_size, unit_bytes;

    Pages(const AttentionShape& shape, void* keys, void* values, void* scales)
        : keys(static_cast<char*>(keys)), values(static_cast<char*>(values)), scales(static_cast<float*>(scales)),
          heads_in_block(shape.heads_in_block), scales_in_block(shape.scales_in_block),
          latent_units(shape.is_latent ? shape.value_dim / PER_UNIT<T> : 0),
          key_units(shape.key_dim / PER_UNIT<T> - latent_units), value_dim(shape.value_dim), block_size(shape.block_size),
          unit_bytes(scales ? PER_UNIT<T> : sizeof(uint32_t)) {}

    int64_t query_units() const { return latent_units + key_units; }

    // Returns the key units of LANES tokens from `slot` on, `block_size` apart.
    const char* key_group(int32_t block, int64_t slot, int64_t kv_head) const {
        return keys + ((block * heads_in_block + kv_head) * key_units * block_size + slot) * unit_bytes;
    }
    const char* value_row(int32_t block, int64_t slot, int64_t kv_head) const {
        return values + ((block * heads_in_block + kv_head) * block_size + slot) / PER_UNIT<T> * value_dim * unit_bytes;
    }
    // Returns the keys' scales from `slot` on. The values' scales are `block_size` further on.
    float* scale_group(int32_t block, int64_t slot, int64_t kv_head) const {
        return scales + (block * scales_in_block + kv_head) * 2 * block_size + slot;
    }

    void write(int64_t slot, int64_t kv_head, const T* key, const T* value) const {
        const int64_t block = slot / block_size, offset = slot % block_size;
        if (scales) return write_in_int8(int32_t(block), offset, kv_head, key, value);
        auto* column = reinterpret_cast<uint32_t*>(const_cast<char*>(key_group(int32_t(block), offset, kv_head)));
        for (int64_t unit = 0; unit < key_units; ++unit)
            std::memcpy(column + unit * block_size, key + (latent_units + unit) * PER_UNIT<T>, sizeof(uint32_t));
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

    // Calls put(first, numbers) for each LANES numbers of a row. Returns their scale, or a NaN if the row contains one.
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

// Computes the scores of ROWS query rows and GROUPS × LANES tokens. Prefetches the groups `ahead` of them.
template <typename T, int ROWS, int GROUPS>
inline void score(const uint32_t* query, int64_t key_units, const uint32_t* const* groups, int64_t ahead,
                  int64_t stride, float* scores, int64_t row_stride) {
    const uint32_t *keys[GROUPS], *next[GROUPS];
    for (int group = 0; group < GROUPS; ++group) keys[group] = groups[group], next[group] = groups[ahead + group];
    Vector sums[ROWS][GROUPS] = {};
    add_products<Factor<T>, ROWS, GROUPS>(sums, keys, next, stride, stride, query, FACTOR_WORDS<T> * key_units, key_units);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row)  // a copy of a whole row would make GCC keep all rows in memory
#pragma GCC unroll 4
        for (int group = 0; group < GROUPS; ++group) store(sums[row][group], scores + row * row_stride + group * LANES);
}

// Adds the weighted values of some groups, of `num_units` units of tokens each, to WIDTH vectors of each row's sums.
// `mask` zeroes the second token of an incomplete unit. Prefetches the groups `ahead` of them.
template <typename T, int ROWS, int WIDTH>
inline void weigh(const uint32_t* weights, int64_t weight_stride, const uint32_t* const* groups, int64_t num_groups,
                  int64_t ahead, int64_t offset, int64_t value_dim, int64_t num_units, uint32_t mask, float* sums) {
    Vector totals[ROWS][WIDTH];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int part = 0; part < WIDTH; ++part) totals[row][part] = load(sums + row * value_dim + part * LANES);
    int64_t group = 0;
    do {
        const uint32_t *values[WIDTH], *next[WIDTH];
        for (int part = 0; part < WIDTH; ++part) {
            values[part] = groups[group] + offset + part * LANES;
            next[part] = groups[group + ahead] + offset + part * LANES;
        }
        add_products<Factor<T>, ROWS, WIDTH>(totals, values, next, value_dim, value_dim, weights, weight_stride, num_units,
                                             mask);
        weights += FACTOR_WORDS<T> * num_units;
    } while (++group < num_groups);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int part = 0; part < WIDTH; ++part) store(totals[row][part], sums + row * value_dim + part * LANES);
}

// The scales of keys and values in int8, by a token's position in its sequence; null for the model's type.
struct Scales {
    const float *keys, *values;
};

// Converts the scores of a row, which attends to tokens [first, end) of [begin, padded), to weights relative to the
// greatest score. Returns that score and the sum of the weights. The stored weights include the values' scales.
template <typename T>
inline std::pair<float, float> softmax(float* scores, uint32_t* weights, int64_t begin, int64_t first, int64_t end,
                                       int64_t padded, const AttentionShape& shape, Scales scales) {
    constexpr float LEAST = -std::numeric_limits<float>::infinity();
    if (first >= end) {
        for (int64_t at = begin; at < padded; at += LANES) store_factors<T>(Vector{}, weights, at);
        return {LEAST, 0.0f};
    }
    float scaling = shape.scaling * LOG2_E;  // converts `scores` to exponents of 2
    if (scales.keys || shape.softcap != 0.0f) {
        for (int64_t at = begin; at < padded; at += LANES) {
            const Vector scaled = load(scores + at) * shape.scaling;
            store(scales.keys ? scaled * load(scales.keys + at) : scaled, scores + at);
        }
        scaling = LOG2_E;
    }
    std::fill(scores + begin, scores + first, LEAST);
    std::fill(scores + end, scores + padded, LEAST);
    if (shape.softcap != 0.0f)
        for (int64_t at = first; at < end; ++at) scores[at] = std::tanh(scores[at] / shape.softcap) * shape.softcap;
    Vector greatest = load(scores + begin);
    for (int64_t at = begin + LANES; at < padded; at += LANES) greatest = greater_of(greatest, load(scores + at));
    const float most = greatest_of(greatest) * scaling;
    Vector total = {};
    for (int64_t at = begin; at < padded; at += LANES) {
        const Vector weight = power_of_two(load(scores + at) * scaling - most);
        total += weight;
        store_factors<T>(scales.values ? weight * load(scales.values + at) : weight, weights, at);
    }
    return {most, sum_of(total)};
}

// Each row's result over the tokens so far: the weighted sum of values, the greatest score, and the sum of weights.
struct Attended {
    float *values, *greatest, *weights;  // [rows][value_dim], [rows], [rows]
    int64_t value_dim;

    static int64_t size(int64_t num_rows, int64_t value_dim) { return num_rows * (value_dim + 2); }
    Attended(float* memory, int64_t num_rows, int64_t value_dim)
        : values(memory), greatest(memory + num_rows * value_dim), weights(greatest + num_rows), value_dim(value_dim) {}
    void clear(int64_t num_rows) const {
        std::fill_n(values, num_rows * value_dim, 0.0f);
        std::fill_n(greatest, num_rows, -std::numeric_limits<float>::infinity());
        std::fill_n(weights, num_rows, 0.0f);
    }
    Attended from(int64_t row) const {
        Attended later = *this;
        later.values += row * value_dim, later.greatest += row, later.weights += row;
        return later;
    }

    // Merges the result of the next piece.
    void add(const Attended& piece, int64_t num_rows) const {
        for (int64_t row = 0; row < num_rows; ++row) {
            if (piece.weights[row] == 0.0f) continue;  // the row attends to none of the piece's tokens
            const float most = std::max(greatest[row], piece.greatest[row]);
            const Vector own = power_of_two(Vector{} + (greatest[row] - most));
            const Vector other = power_of_two(Vector{} + (piece.greatest[row] - most));
            float* const sums = values + row * value_dim;
            const float* const added = piece.values + row * value_dim;
            for (int64_t dim = 0; dim < value_dim; dim += LANES)
                store(load(sums + dim) * own + load(added + dim) * other, sums + dim);
            weights[row] = weights[row] * own[0] + piece.weights[row] * other[0];
            greatest[row] = most;
        }
    }
};

// Transposes the latents of LANES tokens from the layout of values to the layout of keys, [latent_units][LANES].
inline void turn_latents(const uint32_t* values, int64_t latent_units, int64_t value_dim, Words* to, float) {
    auto* units = reinterpret_cast<uint32_t*>(to);
    for (int64_t first = 0; first < latent_units; first += LANES)
        for (int token = 0; token < LANES; ++token)
            for (int64_t unit = first; unit < std::min(first + LANES, latent_units); ++unit)
                units[unit * LANES + token] = values[token * value_dim + unit];
}
inline void turn_latents(const uint32_t* values, int64_t latent_units, int64_t value_dim, Words* to, bf16) {
    auto* units = reinterpret_cast<uint32_t*>(to);
    for (int64_t first = 0; first < latent_units; first += LANES)
        for (int pair = 0; pair < LANES / 2; ++pair)
            for (int64_t unit = first; unit < std::min(first + LANES, latent_units); ++unit) {
                const uint32_t *from = values + pair * value_dim + 2 * unit, left = from[0], right = from[1];
                units[unit * LANES + 2 * pair] = (left & 0xffffu) | right << 16;
                units[unit * LANES + 2 * pair + 1] = left >> 16 | (right & 0xffff0000u);
            }
}
template <typename T>
void turn_latents(const uint32_t* values, int64_t latent_units, int64_t value_dim, Words* to) {
    turn_latents(values, latent_units, value_dim, to, T{});
}

// The groups of LANES tokens that a thread reads, in order, and how many groups ahead it prefetches.
struct Walk {
    std::vector<const uint32_t*> keys, values;  // pointers to bytes in int8
    std::vector<const float*> scales;           // of keys and values in int8
    std::vector<Words> converted;
    std::vector<bool> is_made;  // by group: whether the keys of latent attention have been joined
    int64_t num_made;           // groups of the piece
    int64_t keys_ahead, values_ahead, key_stride;  // the stride is in units
    bool is_int8;

    template <typename T>
    void clear(const Pages<T>& pages) {
        keys.clear();
        values.clear();
        scales.clear();
        is_made.clear();
        key_stride = pages.block_size;
        is_int8 = pages.scales != nullptr;
    }
    int64_t size() const { return int64_t(keys.size()); }
    // Adds tokens [begin, end) of a sequence. `begin` must be a multiple of LANES.
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
    // Ends the list. The first `num_shared` tokens are already in a cache, so while they are read, the sequences' own
    // tokens, which follow, are prefetched.
    template <typename T>
    void end(int64_t num_shared) {
        constexpr int64_t MOST_AHEAD = 16;  // groups; more would be evicted from the cache before use
        const int64_t own_ahead = std::min(num_shared / LANES, MOST_AHEAD);
        keys_ahead = std::max<int64_t>(4, own_ahead);
        values_ahead = std::max<int64_t>(PER_UNIT<T>, own_ahead);
        keys.resize(keys.size() + keys_ahead, keys.back());  // so that prefetching after the last group is valid
        values.resize(values.size() + values_ahead, values.back());
    }
    // Joins the two parts of some groups' keys: the latents, which are stored as values, and the rest. A piece's keys
    // are joined before it is read, in the memory of the previous piece's keys.
    template <typename T>
    void make_keys(const Pages<T>& pages, int64_t first, int64_t end) {
        for (int64_t group = first; group < end; ++group) {
            if (is_made[group]) continue;
            is_made[group] = true;
            Words* const to = converted.data() + num_made++ * pages.query_units();
            turn_latents<T>(values[group], pages.latent_units, pages.value_dim, to);
            for (int64_t unit = 0; unit < pages.key_units; ++unit)
                to[pages.latent_units + unit] = load_units(keys[group] + unit * pages.block_size);
            keys[group] = reinterpret_cast<const uint32_t*>(to);
        }
    }
    // Call before a piece's groups are joined. most: the most groups in a piece.
    template <typename T>
    void begin_keys(const Pages<T>& pages, int64_t most) {
        num_made = 0;
        key_stride = LANES;
        is_made.resize(keys.size(), false);
        converted.resize(most * pages.query_units());
    }
    // Converts groups [first, end) of a piece from int8. Afterwards, only converted groups may be read.
    template <typename T>
    void convert(const Pages<T>& pages, int64_t first, int64_t end) {
        const int64_t key_rows = pages.key_units, value_rows = pages.value_dim / PER_UNIT<T>;
        converted.resize((end - first) * (key_rows + value_rows));
        Words* to = converted.data();
        const auto convert = [&](const uint32_t** groups, int64_t ahead, int64_t stride, int64_t num_rows) {
            convert_group<T>(groups[0], groups[ahead], stride, num_rows, to);
            groups[0] = reinterpret_cast<const uint32_t*>(to);
            to += num_rows;
        };
        for (int64_t group = first; group < end; ++group) {
            convert(&keys[group], keys_ahead, pages.block_size, key_rows);
            convert(&values[group], values_ahead, LANES, value_rows);
        }
        key_stride = LANES;
        is_int8 = false;
    }
};

struct Scratch {  // a thread's buffers, reused in later calls
    std::vector<uint32_t> query, weights;
    std::vector<Words> converted;  // whole cache lines
    std::vector<float> scores, attended, piece, key_scales, value_scales;
};

// Calls body(groups, first, count) with as many groups at a time, converted from int8, as fit in the L1 cache. A group
// consists of `num_rows` times LANES units, which are `stride` units apart in the source.
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
        for (int64_t at = 0; at < count; ++at)
            convert_group<T>(groups[first + at], groups[first + at + ahead], stride, num_rows,
                             scratch.converted.data() + at * num_rows);
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
    constexpr int64_t GROUPS = 8;  // groups whose values stay in the L1 cache for all dimensions
    const auto add = [&](int64_t num_groups, int64_t skipped, int64_t num_units, uint32_t mask) {
        const uint32_t* from = weights + FACTOR_WORDS<T> * skipped;
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
        weights += num_groups * UNITS * FACTOR_WORDS<T>;
        num_tokens -= num_groups * LANES;
    }
    if (num_tokens / PER_UNIT<T>) add(1, 0, num_tokens / PER_UNIT<T>, ~0u);
    if (num_tokens % PER_UNIT<T>) add(1, num_tokens / PER_UNIT<T>, 1, 0xffffu);
}

// In the matrix unit, tiles 0 to 3 hold sums, tile 4 queries, 5 weights, 6 keys and 7 values.
inline void configure_amx(int rows) {
    amx::Shapes shapes;
    for (int tile = 0; tile < 5; ++tile) shapes.set(tile, rows);
    shapes.set(5, rows, LANES / PER_UNIT<bf16>);
    shapes.set(6, amx::UNITS);
    shapes.set(7, LANES / PER_UNIT<bf16>);
    amx::configure(shapes);
}

// Like `score`, for as many rows as the tiles are configured for, with a group for each PART.
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

// Like `weigh`, for LANES dimensions per PART. If the last group has fewer tokens, the memory after them is read as
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

// The functions that compute several query rows together.
struct Rows {
    const Tile* tiles;  // indexed by the number of rows
    int64_t most;
};

template <typename T>
Rows rows_together(const AttentionShape& shape) {
    return amx::fits<T>(shape.key_dim) ? Rows{AMX_TILES, amx::ROWS} : Rows{TILES<T>.data(), MAX_ROWS};
}

// Query rows of a sequence and a KV head that are computed together: some tokens × some heads.
struct Part {
    int64_t group;                              // where its own tokens start in the walk
    int64_t begin;                              // the first of its own tokens
    int64_t first_token, num_tokens, position;  // the first token's index in the packed row, and its position
    int64_t first_head, num_heads;

    int64_t num_rows() const { return num_tokens * num_heads; }
    int64_t length() const { return position + num_tokens; }
    int64_t group_at(int64_t own) const { return group + (own - begin) / LANES; }
    int64_t token(int64_t row) const { return first_token + row / num_heads; }
    int64_t head(int64_t row) const { return first_head + row % num_heads; }
};

// Tokens [begin, end) of a sequence. `begin` must be a multiple of LANES.
struct Stretch {
    int64_t begin, end;

    bool is_empty() const { return begin >= end; }
    int64_t padded() const { return (end + LANES - 1) / LANES * LANES; }
    int64_t num_groups() const { return (padded() - begin) / LANES; }
};

// Return the part of a piece in the blocks that several sequences share, and the part after them.
inline Stretch shared_of(Stretch piece, int64_t num_shared) { return {piece.begin, std::min(piece.end, num_shared)}; }
inline Stretch own_of(Stretch piece, const Part& part) {
    return {std::max(piece.begin, part.begin), std::min(piece.end, part.length())};
}

// Collects scales by position in the piece. They are 0 after the last token, where memory may contain anything.
inline Scales scales_by_position(const Walk& walk, const Part& part, int64_t num_shared, int64_t shared_group,
                                 Stretch piece, int64_t block_size, Scratch& scratch) {
    scratch.key_scales.resize(PIECE);
    scratch.value_scales.resize(PIECE);
    float *const keys = scratch.key_scales.data(), *const values = scratch.value_scales.data();
    const auto copy = [&](int64_t group, Stretch of) {
        for (int64_t at = of.begin - piece.begin; at < of.end - piece.begin; at += LANES, ++group) {
            store(load(walk.scales[group]), keys + at);
            store(load(walk.scales[group] + block_size), values + at);
        }
    };
    const Stretch own = own_of(piece, part);
    copy(shared_group, shared_of(piece, num_shared));
    copy(part.group_at(own.begin), own);
    if (!own.is_empty()) std::fill(values + own.end - piece.begin, values + own.padded() - piece.begin, 0.0f);
    return {keys, values};
}

// Computes the attention of some parts' rows in one piece: over the first `num_shared` tokens of the walk, which are
// read once for all rows that are computed together, and over each part's own tokens. The walk starts with the shared
// tokens from `walk_begin` on.
template <typename T>
void attend_piece(const AttentionShape& shape, const Rows& rows, const Pages<T>& pages, Walk& walk,
                  const Part* parts, int64_t num_parts, int64_t num_shared, int64_t walk_begin, Stretch piece,
                  Heads<const T> query, const Attended& result, Scratch& scratch) {
    int64_t num_rows = 0;
    const auto each_part = [&](auto&& body) {
        int64_t row = 0;
        for (const Part* part = parts; part < parts + num_parts; row += part++->num_rows()) body(*part, row);
    };
    each_part([&](const Part& part, int64_t) { num_rows += part.num_rows(); });
    const Stretch shared = shared_of(piece, num_shared);
    const int64_t shared_group = (piece.begin - walk_begin) / LANES;
    const auto each_tile = [&](auto&& body) {  // for the shared tokens
        for (int64_t row = 0; !shared.is_empty() && row < num_rows; row += rows.most)
            body(rows.tiles[std::min(rows.most, num_rows - row)], row);
    };
    // If the length of rows were a power of two, all rows would compete for the same few lines of a core's cache.
    constexpr int64_t STRIDE = PIECE + 2 * LANES, WEIGHT_STRIDE = words_of<T>(STRIDE);
    const int64_t query_words = words_of<T>(shape.key_dim);
    scratch.query.resize(num_rows * query_words);
    scratch.scores.resize(num_rows * STRIDE);
    scratch.weights.resize(num_rows * WEIGHT_STRIDE);
    std::fill_n(result.values, num_rows * shape.value_dim, 0.0f);
    const auto query_of = [&](int64_t row) { return scratch.query.data() + row * query_words; };
    const auto scores_of = [&](int64_t row) { return scratch.scores.data() + row * STRIDE; };
    const auto weights_of = [&](int64_t row) { return scratch.weights.data() + row * WEIGHT_STRIDE; };

    each_part([&](const Part& part, int64_t first) {
        for (int64_t row = 0; row < part.num_rows(); ++row)
            copy_factors(query.at(part.token(row), part.head(row)), shape.key_dim, query_of(first + row));
    });
    const auto score = [&](const Tile& tile, int64_t row, int64_t group, Stretch of) {
        const uint32_t* const* keys = walk.keys.data() + group;
        float* const to = scores_of(row) + of.begin - piece.begin;
        if (!walk.is_int8)
            return tile.score(query_of(row), pages.query_units(), keys, of.num_groups(), walk.keys_ahead, walk.key_stride,
                              to, STRIDE);
        each_converted<T>(keys, of.num_groups(), walk.keys_ahead, pages.block_size, pages.key_units, scratch,
                          [&](const uint32_t* const* converted, int64_t first, int64_t count) {
                              tile.score(query_of(row), pages.key_units, converted, count, 0, LANES,
                                         to + first * LANES, STRIDE);
                          });
    };
    const auto weigh = [&](const Tile& tile, int64_t row, int64_t group, Stretch of) {
        const uint32_t* const* values = walk.values.data() + group;
        const uint32_t* const weights = weights_of(row) + words_of<T>(of.begin - piece.begin);
        float* const sums = result.from(row).values;
        if (!walk.is_int8)
            return tile.weigh(weights, WEIGHT_STRIDE, values, of.end - of.begin, walk.values_ahead, shape.value_dim, sums);
        each_converted<T>(values, of.num_groups(), walk.values_ahead, LANES, pages.value_dim / PER_UNIT<T>, scratch,
                          [&](const uint32_t* const* converted, int64_t first, int64_t count) {
                              const int64_t before = first * LANES;
                              tile.weigh(weights + words_of<T>(before), WEIGHT_STRIDE, converted,
                                         std::min(count * LANES, of.end - of.begin - before), 0, shape.value_dim, sums);
                          });
    };
    const auto each_own = [&](auto&& body) {
        each_part([&](const Part& part, int64_t row) {
            const Stretch own = own_of(piece, part);
            if (!own.is_empty()) body(rows.tiles[part.num_rows()], row, part.group_at(own.begin), own);
        });
    };
    if (shape.is_latent) {
        if (!shared.is_empty()) walk.make_keys(pages, shared_group, shared_group + shared.num_groups());
        each_own([&](const Tile&, int64_t, int64_t group, Stretch own) {
            walk.make_keys(pages, group, group + own.num_groups());
        });
    }
    each_tile([&](const Tile& tile, int64_t row) { score(tile, row, shared_group, shared); });
    each_own(score);
    const int64_t first_group = shared.is_empty() ? parts->group_at(own_of(piece, *parts).begin) : shared_group;
    for (int64_t group = first_group; group < std::min(first_group + walk.values_ahead, walk.size()); ++group)
        for (int64_t at = 0; at < LANES / PER_UNIT<T> * pages.value_dim * pages.unit_bytes; at += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(walk.values[group]) + at);
    const int64_t window = shape.sliding_window;
    each_part([&](const Part& part, int64_t first) {
        const Scales scales = pages.scales
                                  ? scales_by_position(walk, part, num_shared, shared_group, piece, pages.block_size, scratch)
                                  : Scales{};
        const Stretch own = own_of(piece, part);
        const int64_t begin = shared.is_empty() ? own.begin - piece.begin : 0;
        const int64_t padded = (own.is_empty() ? shared.end : own.padded()) - piece.begin;
        for (int64_t row = 0; row < part.num_rows(); ++row) {
            const int64_t end = part.position + row / part.num_heads + 1;
            const int64_t from = window ? std::max<int64_t>(0, end - window) : 0;
            std::tie(result.greatest[first + row], result.weights[first + row]) = softmax<T>(
                scores_of(first + row), weights_of(first + row), begin,
                std::max(begin, from - piece.begin), std::min(end, piece.end) - piece.begin, padded, shape, scales);
        }
    });
    each_tile([&](const Tile& tile, int64_t row) { weigh(tile, row, shared_group, shared); });
    each_own(weigh);
}

// Segments that are computed together: a single one, or several of one token each that start with the same blocks.
struct Group {
    int32_t first, count;  // in the order of `Groups`
    int32_t num_shared;    // tokens in the blocks that all of them start with
};

// A thread's unit of work on a group, for one KV head.
struct Share {
    int32_t group;
    int32_t piece;   // the piece, if the group's pieces are computed separately, or -1 for all
    int64_t memory;  // where the result is stored until it is merged
};

// A step's segments in groups, and the shares of work on them.
class Groups {
  public:
    // most_rows: the most query rows that are computed together.
    void find(const Segment* segments, int64_t num_segments, const int32_t* tables, const AttentionShape& shape,
              int64_t most_rows, int64_t num_threads) {
        order_.assign(segments, segments + num_segments);
        groups_.clear();
        // Segments of several tokens come first, because they take the most time.
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
        find_shares(shape, num_threads);
    }

    const Group& operator[](int64_t at) const { return groups_[at]; }
    const std::vector<Share>& shares() const { return shares_; }
    // The first share of each group whose pieces are computed separately.
    const std::vector<Share>& split() const { return split_; }
    int64_t num_rows(const Group& group, const AttentionShape& shape) const {
        return group.count * segments(group)->num_tokens * (shape.num_heads / shape.num_kv_heads);
    }
    int64_t attended_size(const Group& group, const AttentionShape& shape) const {
        return Attended::size(num_rows(group, shape), shape.value_dim);
    }
    // Returns the memory for the result of a share's rows for one KV head.
    Attended attended(const Share& share, int64_t kv_head, const AttentionShape& shape) {
        const Group& group = groups_[share.group];
        const int64_t before = share.memory * shape.num_kv_heads + kv_head * attended_size(group, shape);
        return {memory_.data() + before, num_rows(group, shape), shape.value_dim};
    }
    // Returns the tokens of a share, which start at the border of a piece.
    Stretch pieces(const Share& share) const {
        const Group& group = groups_[share.group];
        if (share.piece >= 0) return {share.piece * PIECE, (share.piece + 1) * PIECE};
        return {0, num_pieces(group) * PIECE};
    }
    int64_t num_pieces(const Group& group) const {
        int64_t length = 0;
        for (const Segment* own = segments(group); own < segments(group) + group.count; ++own)
            length = std::max<int64_t>(length, own->start + own->num_tokens);
        return (length + PIECE - 1) / PIECE;
    }
    const Segment* segments(const Group& group) const { return order_.data() + group.first; }

  private:
    static constexpr int64_t TASKS = 6;  // the least tasks per thread, so that all threads finish at nearly the same time

    // Divides the work. The pieces of a long group of decoding sequences are computed separately if threads would
    // otherwise wait for one that computes a whole KV head of the group.
    void find_shares(const AttentionShape& shape, int64_t num_threads) {
        constexpr int64_t TOKENS = 4;  // so many prompt tokens take as long as a decoding token, which waits for memory
        shares_.clear();
        split_.clear();
        const auto num_tokens = [&](const Group& group) { return int64_t(segments(group)->num_tokens); };
        int64_t all_pieces = 0, size = 0;
        for (const Group& group : groups_)
            all_pieces += num_pieces(group) * shape.num_kv_heads * ((num_tokens(group) + TOKENS - 1) / TOKENS);
        for (int32_t at = 0; at < int32_t(groups_.size()); ++at) {
            const int64_t pieces = num_pieces(groups_[at]);
            const int64_t tasks = (all_pieces + pieces - 1) / pieces;  // if all tasks took equally long
            const int64_t num_idle = (num_threads - tasks % num_threads) % num_threads;
            if (pieces == 1 || num_tokens(groups_[at]) > 1 || tasks >= TASKS * num_threads || num_idle * 10 < tasks) {
                shares_.push_back({at, -1, 0});
                continue;
            }
            split_.push_back({at, 0, size});
            for (int32_t piece = 0; piece < pieces; ++piece, size += attended_size(groups_[at], shape))
                shares_.push_back({at, piece, size});
        }
        memory_.resize(size * shape.num_kv_heads);
    }

    // Returns how many sequences fill a tile, at least two, or fewer if threads would be idle.
    static int64_t most_together(const AttentionShape& shape, int64_t most_rows, int64_t num_sequences,
                                 int64_t num_threads) {
        const int64_t fitting = std::max<int64_t>(2, most_rows * shape.num_kv_heads / shape.num_heads);
        return std::min(fitting, num_sequences * shape.num_kv_heads / (TASKS * num_threads));
    }

    // Returns the group from `first` on whose number of segments saves the most reads for each of them.
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
    std::vector<Share> shares_, split_;
    std::vector<float> memory_;
};

// Writes the output of some rows of a KV head, token by token, with all of its query heads. A sink takes a share of the
// weights without adding a value.
template <typename T, typename TokenOf>
void put_output(const AttentionShape& shape, int64_t kv_head, int64_t num_rows, TokenOf&& token_of, const Attended& attended,
                Heads<T> output) {
    const int64_t heads_per_kv = shape.num_heads / shape.num_kv_heads;
    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t head = kv_head * heads_per_kv + row % heads_per_kv;
        float divisor = attended.weights[row], scale = 1.0f;
        if (shape.sinks) {
            const float sink = shape.sinks[head] * LOG2_E, most = std::max(attended.greatest[row], sink);
            scale = power_of_two(Vector{} + (attended.greatest[row] - most))[0];
            divisor = divisor * scale + power_of_two(Vector{} + (sink - most))[0];
        }
        T* target = output.at(token_of(row / heads_per_kv), head);
        const float* const sums = attended.values + row * shape.value_dim;
        for (int64_t dim = 0; dim < shape.value_dim; dim += LANES)
            store(round_to(load(sums + dim) * scale / divisor, T{}), target + dim);
    }
}

// Computes a share for the query heads of one KV head: the output, or the result over one piece.
template <typename T>
void attend(const AttentionShape& shape, const Pages<T>& pages, Groups& groups, const Share& share, const int32_t* tables,
            int64_t kv_head, Heads<const T> query, Heads<T> output) {
    static thread_local Scratch scratch;
    static thread_local Walk walk;
    static thread_local std::vector<Part> parts;
    parts.clear();
    walk.clear(pages);
    const Group& group = groups[share.group];
    const Segment *const first = groups.segments(group), *const end = first + group.count;
    const int64_t window = shape.sliding_window, heads_per_kv = shape.num_heads / shape.num_kv_heads;
    const Rows rows = rows_together<T>(shape);
    const int64_t most_heads = std::min(heads_per_kv, rows.most);  // of one part
    const int64_t most_tokens = std::max<int64_t>(1, rows.most / heads_per_kv);
    // A window that excludes the first token of a segment may exclude more tokens of the next segment.
    const bool is_cut = std::any_of(first, end, [&](const Segment& own) { return window && own.start >= window; });
    const int64_t num_shared = is_cut ? 0 : group.num_shared;
    const auto begin = [&](int64_t position) {  // the first own token to which a row at `position` attends
        return num_shared ? num_shared : window ? std::max<int64_t>(0, position + 1 - window) / LANES * LANES : 0;
    };
    Stretch pieces = groups.pieces(share);
    if (is_cut && share.piece < 0) {
        const auto is_before = [](const Segment& one, const Segment& other) { return one.start < other.start; };
        pieces.begin = begin(std::min_element(first, end, is_before)->start) / PIECE * PIECE;
    }
    const auto add = [&](const Segment& own, int64_t from, int64_t length) {
        from = std::max(from, pieces.begin), length = std::min(length, pieces.end);
        if (from < length) walk.add(pages, tables + own.table_offset, kv_head, from, length);
        return from / LANES;
    };
    add(*first, 0, num_shared);
    int64_t num_rows = 0;
    for (const Segment* own = first; own < end; ++own) {
        const int64_t before = walk.size();
        const int64_t skipped = add(*own, begin(own->start), own->start + own->num_tokens);
        for (int64_t token = 0; token < own->num_tokens; token += most_tokens)
            for (int64_t head = 0; head < heads_per_kv; head += most_heads) {
                const int64_t position = own->start + token;
                parts.push_back({before - skipped + begin(position) / LANES, begin(position), own->first_token + token,
                                 std::min<int64_t>(most_tokens, own->num_tokens - token), position,
                                 kv_head * heads_per_kv + head, std::min(most_heads, heads_per_kv - head)});
                num_rows += parts.back().num_rows();
            }
    }
    const auto num_parts = int64_t(parts.size());
    const auto attend_to = [&](int64_t piece, int64_t at, int64_t count, const Attended& result) {
        attend_piece(shape, rows, pages, walk, parts.data() + at, count, num_shared, pieces.begin, {piece, piece + PIECE},
                     query, result, scratch);
    };
    const auto begin_keys = [&] {
        if (shape.is_latent) walk.begin_keys(pages, std::min(walk.size(), (PIECE / LANES + 1) * (num_parts + 1)));
    };
    if (share.piece >= 0) {
        const Attended result = groups.attended(share, kv_head, shape);
        if (walk.size() == 0) return result.clear(num_rows);  // all tokens are outside the windows
        walk.end<T>(num_shared);
        begin_keys();
        return attend_to(pieces.begin, 0, num_parts, result);
    }
    walk.end<T>(num_shared);
    scratch.attended.resize(Attended::size(num_rows, shape.value_dim));
    scratch.piece.resize(Attended::size(num_rows, shape.value_dim));
    const Attended attended(scratch.attended.data(), num_rows, shape.value_dim);
    const Attended further(scratch.piece.data(), num_rows, shape.value_dim);
    const int64_t together = first->num_tokens == 1 ? num_parts : 1;
    const int64_t num_groups = walk.size() - walk.keys_ahead;
    constexpr int64_t LEAST_PARTS = 4;  // with fewer, converting in advance is slower, because groups leave the L1 cache
    const bool converts = walk.is_int8 && together == 1 && num_parts >= LEAST_PARTS;
    for (int64_t piece = pieces.begin; piece < pieces.end; piece += PIECE) {
        begin_keys();
        if (converts)
            walk.convert(pages, std::max<int64_t>(0, parts[0].group_at(piece)),
                         std::min(num_groups, parts[0].group_at(piece + PIECE)));
        for (int64_t at = 0, row = 0; at < num_parts; at += together) {
            const Attended own = attended.from(row);
            const int64_t count = together == 1 ? parts[at].num_rows() : num_rows;
            attend_to(piece, at, together, piece == pieces.begin ? own : further);
            if (piece != pieces.begin) own.add(further, count);
            row += count;
        }
    }
    put_output(shape, kv_head, num_rows,
               [&](int64_t at) {
                   return first->num_tokens > 1 ? first->first_token + at : first[at].first_token;
               },
               attended, output);
}

// Computes the attention of a whole step, inside a thread pool's `run`. Keys and values must have been stored.
template <typename T>
void attend_in(ThreadPool& threads, const AttentionShape& shape, const Pages<T>& pages, Groups& groups,
               const int32_t* tables, Heads<const T> query, Heads<T> output) {
    const int64_t num_heads = shape.num_kv_heads;
    threads.share(int64_t(groups.shares().size()) * num_heads, [&](int64_t task) {
        attend<T>(shape, pages, groups, groups.shares()[task / num_heads], tables, task % num_heads, query, output);
    });
    if (groups.split().empty()) return;
    threads.share(int64_t(groups.split().size()) * num_heads, [&](int64_t task) {
        const int64_t kv_head = task % num_heads;
        const Share* share = &groups.split()[task / num_heads];
        const Group& group = groups[share->group];
        const int64_t num_rows = groups.num_rows(group, shape);
        const Attended attended = groups.attended(*share, kv_head, shape);
        for (Share later = *share; ++later.piece < groups.num_pieces(group);) {
            later.memory += groups.attended_size(group, shape);
            attended.add(groups.attended(later, kv_head, shape), num_rows);
        }
        put_output(shape, kv_head, num_rows, [&](int64_t at) { return groups.segments(group)[at].first_token; }, attended,
                   output);
    });
}

}  // namespace carousel
