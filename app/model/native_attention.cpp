// Paged attention on a CPU: every KV byte of a sequence is read once per tile of query rows. No torch here: plain
// pointers, so that it compiles in seconds; called through ctypes, which holds no interpreter lock meanwhile.
//
// Memory of one layer, so that neither half needs a horizontal sum:
//   keys    [num_blocks][num_kv_heads][key_dim][block_size]    one vector load = one dimension of 16 tokens
//   values  [num_blocks][num_kv_heads][block_size][value_dim]  one vector load = 16 dimensions of one token
//
// Everything is accumulated in float32, each row in an order that depends on that row alone: what shares a step or a
// tile with it never changes its bits.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int LANES = 16;     // tokens scored together; block sizes are multiples of it
constexpr int MAX_ROWS = 12;  // query rows of a tile: tokens of one sequence x heads that share a KV head

struct bf16 {
    uint16_t bits;
};

// The compiler's own vectors: one AVX-512 register, or two or four smaller ones.
typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));

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

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}
inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, bf16* out) {  // round to nearest even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        out->bits = uint16_t((bits >> 16) | 0x40);
        return;
    }
    out->bits = uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// exp for x <= 0, about 2 ulp (the polynomial of Cephes' expf); written so that a loop over it vectorises.
inline float exp_negative(float x) {
    x = std::max(x, -87.0f);
    float n = std::nearbyint(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return p * scale;
}

}  // namespace

extern "C" {

// Mirrored field by field in native_attention.py.
struct Layer {
    int64_t num_heads, num_kv_heads, key_dim, value_dim, block_size;
    float scaling, softcap;  // softcap 0: none
    int64_t sliding_window;  // 0: none
    const float* sinks;      // [num_heads] or null
};

struct Strides {  // in elements; the innermost stride is 1
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
};

struct Segment {  // some neighbouring tokens of one sequence in the packed row
    int32_t first_token, num_tokens;
    int32_t start;         // position of the first
    int32_t table_offset;  // of the sequence's block ids in `tables`
};
}

namespace {

// Blocks lie scattered, so no hardware prefetcher foresees the next one.
template <typename T>
inline void prefetch(const T* from, int64_t count) {
    const char* bytes = reinterpret_cast<const char*>(from);
    for (int64_t at = 0; at < count * int64_t(sizeof(T)); at += 64) __builtin_prefetch(bytes + at);
}

template <typename T, int ROWS>
void score(const float* query, const T* keys, int64_t key_dim, int64_t block_size, float* scores, int64_t stride) {
    Vector sums[ROWS] = {};
    for (int64_t dim = 0; dim < key_dim; ++dim) {
        const Vector key = load(keys + dim * block_size);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) sums[row] += query[row * key_dim + dim] * key;
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) std::memcpy(scores + row * stride, &sums[row], sizeof(Vector));
}

// Adds `WIDTH` vectors of weighted values to each row's sums.
template <typename T, int ROWS, int WIDTH>
void weigh(const float* weights, int64_t stride, const T* values, int64_t value_dim, int num_tokens, float* sums) {
    Vector totals[ROWS][WIDTH];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) std::memcpy(totals[row], sums + row * value_dim, sizeof(totals[row]));
    for (int token = 0; token < num_tokens; ++token) {
        Vector value[WIDTH];
#pragma GCC unroll 4
        for (int part = 0; part < WIDTH; ++part) value[part] = load(values + token * value_dim + part * LANES);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
            for (int part = 0; part < WIDTH; ++part) totals[row][part] += weights[row * stride + token] * value[part];
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) std::memcpy(sums + row * value_dim, totals[row], sizeof(totals[row]));
}

// Scores to weights in place for one row that sees tokens [first, end); others get weight 0.
void softmax(float* scores, int64_t first, int64_t end, int64_t padded, const Layer& layer, int64_t head) {
    if (layer.softcap != 0.0f)
        for (int64_t at = first; at < end; ++at) scores[at] = std::tanh(scores[at] / layer.softcap) * layer.softcap;
    float most = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : most)
    for (int64_t at = first; at < end; ++at) most = std::max(most, scores[at]);
    if (layer.sinks) most = std::max(most, layer.sinks[head]);
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t at = first; at < end; ++at) {
        scores[at] = exp_negative(scores[at] - most);
        total += scores[at];
    }
    if (layer.sinks) total += exp_negative(layer.sinks[head] - most);
    const float scale = 1.0f / total;
#pragma omp simd
    for (int64_t at = first; at < end; ++at) scores[at] *= scale;
    std::fill(scores, scores + first, 0.0f);
    std::fill(scores + end, scores + padded, 0.0f);
}

// One tile: ROWS query rows of one sequence and one KV head; `query` and `sums` are [ROWS][dim] in float32.
template <typename T, int ROWS>
void tile(const Layer& layer, const T* keys, const T* values, const int32_t* table, int64_t kv_head, int64_t first_head,
          int64_t group, int64_t position, const float* query, float* sums, std::vector<float>& scratch) {
    const int64_t size = layer.block_size, num_tokens = ROWS / group;
    const int64_t length = position + num_tokens;
    const int64_t begin =
        layer.sliding_window ? std::max<int64_t>(0, position + 1 - layer.sliding_window) / LANES * LANES : 0;
    const int64_t padded = (length + LANES - 1) / LANES * LANES;
    if (int64_t(scratch.size()) < ROWS * padded) scratch.resize(ROWS * padded);
    float* scores = scratch.data();
    const int64_t key_block = layer.key_dim * size, value_block = layer.value_dim * size;
    for (int64_t at = begin; at < padded; at += LANES) {
        const T* block = keys + (table[at / size] * layer.num_kv_heads + kv_head) * key_block;
        if (at + LANES < padded && (at + LANES) % size == 0)
            prefetch(keys + (table[(at + LANES) / size] * layer.num_kv_heads + kv_head) * key_block, key_block);
        score<T, ROWS>(query, block + at % size, layer.key_dim, size, scores + at, padded);
    }
    prefetch(values + (table[begin / size] * layer.num_kv_heads + kv_head) * value_block, value_block);
    for (int row = 0; row < ROWS; ++row) {
        const int64_t end = position + row / group + 1;
        const int64_t first = layer.sliding_window ? std::max<int64_t>(0, end - layer.sliding_window) : 0;
        softmax(scores + row * padded, first, end, padded, layer, first_head + row % group);
    }
    std::fill(sums, sums + ROWS * layer.value_dim, 0.0f);
    for (int64_t at = begin; at < length; at += LANES) {
        const T* block = values + (table[at / size] * layer.num_kv_heads + kv_head) * value_block;
        if (at + LANES < length && (at + LANES) % size == 0)
            prefetch(values + (table[(at + LANES) / size] * layer.num_kv_heads + kv_head) * value_block, value_block);
        const T* first = block + (at % size) * layer.value_dim;
        const int count = int(std::min<int64_t>(LANES, length - at));
        int64_t dim = 0;
        // Two vectors a row where the registers hold them.
        for (; ROWS <= 8 && dim + 2 * LANES <= layer.value_dim; dim += 2 * LANES)
            weigh<T, ROWS, 2>(scores + at, padded, first + dim, layer.value_dim, count, sums + dim);
        for (; dim < layer.value_dim; dim += LANES)
            weigh<T, ROWS, 1>(scores + at, padded, first + dim, layer.value_dim, count, sums + dim);
    }
}

template <typename T>
using Tile = void (*)(const Layer&, const T*, const T*, const int32_t*, int64_t, int64_t, int64_t, int64_t, const float*,
                      float*, std::vector<float>&);

template <typename T>
constexpr Tile<T> TILES[MAX_ROWS + 1] = {
    nullptr,    tile<T, 1>, tile<T, 2>, tile<T, 3>, tile<T, 4>,  tile<T, 5>,  tile<T, 6>,
    tile<T, 7>, tile<T, 8>, tile<T, 9>, tile<T, 10>, tile<T, 11>, tile<T, 12>,
};

template <typename T>
void attend(const Layer& layer, const Strides& strides, const T* query, const T* keys, const T* values,
            const Segment* segments, int64_t num_segments, const int32_t* tables, T* output, int num_threads) {
    const int64_t heads_per_kv = layer.num_heads / layer.num_kv_heads;
    const int64_t group = std::min<int64_t>(heads_per_kv, MAX_ROWS);  // heads of one tile
    const int64_t tokens_per_tile = std::max<int64_t>(1, MAX_ROWS / heads_per_kv);
    const int64_t num_tasks = num_segments * layer.num_kv_heads;
#pragma omp parallel num_threads(num_threads) if (num_tasks > 1)
    {
        std::vector<float> scratch, rows(MAX_ROWS * layer.key_dim), sums(MAX_ROWS * layer.value_dim);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < num_tasks; ++task) {
            const Segment& segment = segments[task / layer.num_kv_heads];
            const int64_t kv_head = task % layer.num_kv_heads;
            for (int64_t token = 0; token < segment.num_tokens; token += tokens_per_tile) {
                const int64_t num_tokens = std::min<int64_t>(tokens_per_tile, segment.num_tokens - token);
                for (int64_t head = 0; head < heads_per_kv; head += group) {
                    const int64_t num_heads = std::min<int64_t>(group, heads_per_kv - head);
                    const int64_t first_head = kv_head * heads_per_kv + head;
                    const int64_t first_token = segment.first_token + token;
                    for (int64_t row = 0; row < num_tokens * num_heads; ++row) {
                        const T* source = query + (first_token + row / num_heads) * strides.query_token +
                                          (first_head + row % num_heads) * strides.query_head;
                        for (int64_t dim = 0; dim < layer.key_dim; ++dim)
                            rows[row * layer.key_dim + dim] = widen(source[dim]) * layer.scaling;
                    }
                    TILES<T>[num_tokens * num_heads](layer, keys, values, tables + segment.table_offset, kv_head,
                                                     first_head, num_heads, segment.start + token, rows.data(),
                                                     sums.data(), scratch);
                    for (int64_t row = 0; row < num_tokens * num_heads; ++row) {
                        T* target = output + ((first_token + row / num_heads) * layer.num_heads + first_head +
                                              row % num_heads) * layer.value_dim;
                        for (int64_t dim = 0; dim < layer.value_dim; ++dim)
                            narrow(sums[row * layer.value_dim + dim], target + dim);
                    }
                }
            }
        }
    }
}

template <typename T>
void store(const Layer& layer, const Strides& strides, const T* key, const T* value, const int64_t* slots,
           int64_t num_tokens, T* keys, T* values) {
    const int64_t size = layer.block_size;
    for (int64_t token = 0; token < num_tokens; ++token) {
        const int64_t block = slots[token] / size, offset = slots[token] % size;
        for (int64_t head = 0; head < layer.num_kv_heads; ++head) {
            const int64_t at = block * layer.num_kv_heads + head;
            const T* from = key + token * strides.key_token + head * strides.key_head;
            T* column = keys + at * layer.key_dim * size + offset;
            for (int64_t dim = 0; dim < layer.key_dim; ++dim) column[dim * size] = from[dim];
            std::memcpy(values + (at * size + offset) * layer.value_dim,
                        value + token * strides.value_token + head * strides.value_head, layer.value_dim * sizeof(T));
        }
    }
}

}  // namespace

#define EXPORT(NAME, T)                                                                                              \
    extern "C" void carousel_step_##NAME(const Layer* layer, const Strides* strides, const void* query, const void* key, \
                                         const void* value, const int64_t* slots, int64_t num_tokens, void* keys,        \
                                         void* values, const Segment* segments, int64_t num_segments,                    \
                                         const int32_t* tables, void* output, int32_t num_threads) {                     \
        store<T>(*layer, *strides, (const T*)key, (const T*)value, slots, num_tokens, (T*)keys, (T*)values);             \
        attend<T>(*layer, *strides, (const T*)query, (const T*)keys, (const T*)values, segments, num_segments, tables,   \
                  (T*)output, num_threads);                                                                              \
    }

EXPORT(f32, float)
EXPORT(bf16, bf16)
