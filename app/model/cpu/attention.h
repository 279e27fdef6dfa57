// Paged attention: every KV byte of a sequence is read once per tile of query rows.
//
// Memory of one layer, in units of vectors.h, so that neither half needs a sum across lanes:
//   keys    [num_blocks][num_kv_heads][key_units][block_size]            a load is one unit of 16 tokens
//   values  [num_blocks][num_kv_heads][block_size / PER_UNIT][value_dim] a load is 16 dimensions of a unit of tokens
//
// Everything is accumulated in float32, each row in an order that depends on that row alone: what shares a step or a
// tile with it never changes its bits.
#pragma once

#include <limits>
#include <vector>

#include "vectors.h"

namespace carousel {

constexpr int MAX_ROWS = 12;  // query rows of a tile: tokens of one sequence × heads that share a KV head

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

// The KV memory of one layer.
template <typename T>
struct Pages {
    uint32_t *keys, *values;
    int64_t num_kv_heads, key_units, value_dim, block_size;

    Pages(const AttentionShape& shape, void* keys, void* values)
        : keys(static_cast<uint32_t*>(keys)), values(static_cast<uint32_t*>(values)),
          num_kv_heads(shape.num_kv_heads), key_units(shape.key_dim / PER_UNIT<T>), value_dim(shape.value_dim),
          block_size(shape.block_size) {}

    // The key units of LANES tokens from `slot` on, `block_size` apart.
    const uint32_t* key_group(int32_t block, int64_t slot, int64_t kv_head) const {
        return keys + (block * num_kv_heads + kv_head) * key_units * block_size + slot;
    }
    const uint32_t* value_row(int32_t block, int64_t slot, int64_t kv_head) const {
        return values + ((block * num_kv_heads + kv_head) * block_size + slot) / PER_UNIT<T> * value_dim;
    }

    void write(int64_t slot, int64_t kv_head, const T* key, const T* value) const {
        const int64_t block = slot / block_size, offset = slot % block_size;
        uint32_t* column = const_cast<uint32_t*>(key_group(int32_t(block), offset, kv_head));
        for (int64_t unit = 0; unit < key_units; ++unit)
            std::memcpy(column + unit * block_size, key + unit * PER_UNIT<T>, sizeof(uint32_t));
        T* row = reinterpret_cast<T*>(const_cast<uint32_t*>(value_row(int32_t(block), offset, kv_head)));
        for (int64_t dim = 0; dim < value_dim; ++dim) row[dim * PER_UNIT<T> + offset % PER_UNIT<T>] = value[dim];
    }
};

// Scores of ROWS query rows with GROUPS times LANES tokens; fetches the keys of the groups behind them.
template <typename T, int ROWS, int GROUPS>
inline void score(const uint32_t* query, int64_t key_units, const uint32_t* const* groups, int64_t stride,
                  float* scores, int64_t row_stride) {
    Vector sums[ROWS][GROUPS] = {};
    for (int64_t unit = 0; unit < key_units; ++unit) {
        Words keys[GROUPS];
#pragma GCC unroll 4
        for (int group = 0; group < GROUPS; ++group) {
            keys[group] = load_units(groups[group] + unit * stride);
            __builtin_prefetch(groups[GROUPS + group] + unit * stride);
        }
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
            const Words part = broadcast(query[row * key_units + unit]);
#pragma GCC unroll 4
            for (int group = 0; group < GROUPS; ++group)
                sums[row][group] = multiply_add<T>(sums[row][group], keys[group], part);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) std::memcpy(scores + row * row_stride, sums[row], sizeof(sums[row]));
}

// Adds the weighted values of `num_units` units of tokens to WIDTH vectors of each row's sums; `mask` zeroes the second
// token of an incomplete unit.
template <typename T, int ROWS, int WIDTH>
inline void weigh(const uint32_t* weights, int64_t weight_stride, const uint32_t* values, const uint32_t* next,
                  int64_t value_dim, int64_t num_units, uint32_t mask, float* sums) {
    Vector totals[ROWS][WIDTH];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) std::memcpy(totals[row], sums + row * value_dim, sizeof(totals[row]));
    for (int64_t unit = 0; unit < num_units; ++unit) {
        Words value[WIDTH];
#pragma GCC unroll 4
        for (int part = 0; part < WIDTH; ++part) {
            value[part] = load_units(values + unit * value_dim + part * LANES) & mask;
            __builtin_prefetch(next + unit * value_dim + part * LANES);
        }
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
            const Words weight = broadcast(weights[row * weight_stride + unit]);
#pragma GCC unroll 4
            for (int part = 0; part < WIDTH; ++part)
                totals[row][part] = multiply_add<T>(totals[row][part], value[part], weight);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) std::memcpy(sums + row * value_dim, totals[row], sizeof(totals[row]));
}

// Turns the scores of one row, which attends to tokens [first, end) of [begin, padded), into weights relative to the
// greatest; returns the divisor of the weighted sum.
template <typename T>
inline float softmax(float* scores, T* weights, int64_t begin, int64_t first, int64_t end, int64_t padded,
                     const AttentionShape& shape, int64_t head) {
    std::fill(scores + begin, scores + first, -std::numeric_limits<float>::infinity());
    std::fill(scores + end, scores + padded, -std::numeric_limits<float>::infinity());
    for (int64_t at = begin; at < padded; at += LANES) store(load(scores + at) * shape.scaling, scores + at);
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
        store(round_to(weight, T{}), weights + at);
    }
    return sum_of(total) + (shape.sinks ? exponential(Vector{} + (shape.sinks[head] - most))[0] : 0.0f);
}

struct Scratch {  // of one thread, kept from call to call
    std::vector<uint32_t> query, weights;
    std::vector<float> scores, sums;
};

// One tile: ROWS query rows of one sequence and one KV head; scratch.query to scratch.sums, [ROWS][dim].
template <typename T, int ROWS>
void attend_tile(const AttentionShape& shape, const Pages<T>& pages, const int32_t* table, int64_t kv_head,
                 int64_t first_head, int64_t num_heads, int64_t position, Scratch& scratch, float* divisors) {
    constexpr int GROUPS = ROWS <= 4 ? 4 : 2;
    constexpr int WIDTH = ROWS <= 4 ? 4 : 2;
    const int64_t size = pages.block_size, window = shape.sliding_window;
    const int64_t length = position + ROWS / num_heads;
    const int64_t begin = window ? std::max<int64_t>(0, position + 1 - window) / LANES * LANES : 0;
    const int64_t padded = (length + LANES - 1) / LANES * LANES;
    scratch.scores.resize(ROWS * padded);
    scratch.weights.resize(ROWS * padded / PER_UNIT<T>);
    scratch.sums.assign(ROWS * shape.value_dim, 0.0f);
    float* scores = scratch.scores.data();
    T* weights = reinterpret_cast<T*>(scratch.weights.data());
    const auto group_at = [&](int64_t at) {  // past the end: any valid address
        at = std::min(at, padded - LANES);
        return pages.key_group(table[at / size], at % size, kv_head);
    };
    const auto row_at = [&](int64_t at) {
        at = std::min(at, padded - LANES);
        return pages.value_row(table[at / size], at % size, kv_head);
    };
    for (int64_t at = begin; at < padded;) {
        const uint32_t* groups[2 * GROUPS];
        const bool is_whole = at + GROUPS * LANES <= padded;
        const int count = is_whole ? GROUPS : 1;
        for (int group = 0; group < 2 * count; ++group) groups[group] = group_at(at + group * LANES);
        if (is_whole)
            score<T, ROWS, GROUPS>(scratch.query.data(), pages.key_units, groups, size, scores + at, padded);
        else
            score<T, ROWS, 1>(scratch.query.data(), pages.key_units, groups, size, scores + at, padded);
        at += count * LANES;
    }
    const uint32_t* first_values = row_at(begin);
    for (int64_t at = 0; at < LANES / PER_UNIT<T> * pages.value_dim; at += LANES) __builtin_prefetch(first_values + at);
    for (int row = 0; row < ROWS; ++row) {
        const int64_t end = position + row / num_heads + 1;
        divisors[row] = softmax(scores + row * padded, weights + row * padded, begin,
                                window ? std::max<int64_t>(0, end - window) : 0, end, padded, shape,
                                first_head + row % num_heads);
    }
    const int64_t weight_stride = padded / PER_UNIT<T>;
    for (int64_t at = begin; at < length; at += LANES) {
        const int64_t num_tokens = std::min<int64_t>(LANES, length - at), num_whole = num_tokens / PER_UNIT<T>;
        const uint32_t *values = row_at(at), *next = row_at(at + LANES);
        const auto add = [&](auto width, int64_t dim) {
            const uint32_t* part = scratch.weights.data() + at / PER_UNIT<T>;
            float* sums = scratch.sums.data() + dim;
            weigh<T, ROWS, decltype(width)::value>(part, weight_stride, values + dim, next + dim, shape.value_dim,
                                                   num_whole, ~0u, sums);
            if (num_tokens % PER_UNIT<T>)
                weigh<T, ROWS, decltype(width)::value>(part + num_whole, weight_stride,
                                                       values + num_whole * shape.value_dim + dim, next,
                                                       shape.value_dim, 1, 0xffffu, sums);
        };
        int64_t dim = 0;
        for (; dim + WIDTH * LANES <= shape.value_dim; dim += WIDTH * LANES)
            add(std::integral_constant<int, WIDTH>{}, dim);
        for (; dim < shape.value_dim; dim += LANES) add(std::integral_constant<int, 1>{}, dim);
    }
}

template <typename T>
using Tile = void (*)(const AttentionShape&, const Pages<T>&, const int32_t*, int64_t, int64_t, int64_t, int64_t,
                      Scratch&, float*);

template <typename T>
constexpr Tile<T> TILES[MAX_ROWS + 1] = {
    nullptr,           attend_tile<T, 1>, attend_tile<T, 2>, attend_tile<T, 3>,  attend_tile<T, 4>,
    attend_tile<T, 5>, attend_tile<T, 6>, attend_tile<T, 7>, attend_tile<T, 8>,  attend_tile<T, 9>,
    attend_tile<T, 10>, attend_tile<T, 11>, attend_tile<T, 12>,
};

// The output of one segment's tokens for the query heads of one KV head. Its keys and values are written already.
template <typename T>
void attend(const AttentionShape& shape, const Pages<T>& pages, const Segment& segment, const int32_t* table,
            int64_t kv_head, Heads<const T> query, Heads<T> output) {
    static thread_local Scratch scratch;
    const int64_t heads_per_kv = shape.num_heads / shape.num_kv_heads;
    const int64_t group = std::min<int64_t>(heads_per_kv, MAX_ROWS);  // heads of one tile
    const int64_t tokens_per_tile = std::max<int64_t>(1, MAX_ROWS / heads_per_kv);
    scratch.query.resize(MAX_ROWS * pages.key_units);
    for (int64_t token = 0; token < segment.num_tokens; token += tokens_per_tile) {
        const int64_t num_tokens = std::min<int64_t>(tokens_per_tile, segment.num_tokens - token);
        const int64_t first_token = segment.first_token + token;
        for (int64_t head = 0; head < heads_per_kv; head += group) {
            const int64_t num_heads = std::min<int64_t>(group, heads_per_kv - head), num_rows = num_tokens * num_heads;
            const int64_t first_head = kv_head * heads_per_kv + head;
            for (int64_t row = 0; row < num_rows; ++row)
                std::memcpy(scratch.query.data() + row * pages.key_units,
                            query.at(first_token + row / num_heads, first_head + row % num_heads),
                            shape.key_dim * sizeof(T));
            float divisors[MAX_ROWS];
            TILES<T>[num_rows](shape, pages, table, kv_head, first_head, num_heads, segment.start + token, scratch,
                               divisors);
            for (int64_t row = 0; row < num_rows; ++row) {
                T* target = output.at(first_token + row / num_heads, first_head + row % num_heads);
                const float* sums = scratch.sums.data() + row * shape.value_dim;
                for (int64_t dim = 0; dim < shape.value_dim; dim += LANES)
                    store(round_to(load(sums + dim) / divisors[row], T{}), target + dim);
            }
        }
    }
}

}  // namespace carousel
