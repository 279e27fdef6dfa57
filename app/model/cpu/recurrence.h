// Operators with a recurrent state, as app/model/recurrence.py defines them. A thread carries some channels, columns or
// rows of a layer's states through all pieces of a step, token by token. Results therefore do not depend on how a
// sequence is split into pieces, on other sequences in the step, or on the number of threads.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "registers.h"
#include "thread_pool.h"
#include "vectors.h"

namespace carousel {

struct Piece {  // at least one consecutive token of a sequence in the packed row
    int32_t first_token, num_tokens;
    int32_t read_slot;  // -1 for the zero state
    int32_t written_slot;
};

// The pieces of a step. A piece may read a slot that an earlier one has written.
struct Pieces {
    const Piece* data;
    int64_t count;

    const Piece* begin() const { return data; }
    const Piece* end() const { return data + count; }
};

// A layer's states, each of which is contiguous.
template <typename T>
struct States {
    T* data;
    int64_t stride;  // in elements

    const T* read(const Piece& piece, int64_t offset) const {
        return piece.read_slot < 0 ? nullptr : data + piece.read_slot * stride + offset;
    }
    T* written(const Piece& piece, int64_t offset) const { return data + piece.written_slot * stride + offset; }
};

// The numbers in a register, because GCC keeps larger vectors in memory.
typedef uint16_t HalvesPart __attribute__((vector_size(PART_LANES * 2)));

inline FloatPart load_part(const float* from) {
    FloatPart result;
    std::memcpy(&result, from, sizeof(result));
    return result;
}
inline FloatPart load_part(const bf16* from) {
    HalvesPart halves;
    std::memcpy(&halves, from, sizeof(halves));
    return (FloatPart)(__builtin_convertvector(halves, WordsPart) << 16);
}
// Rounds like `round_to`.
inline void store_part(FloatPart x, float* to) { std::memcpy(to, &x, sizeof(x)); }
inline void store_part(FloatPart x, bf16* to) {
    const WordsPart bits = (WordsPart)x, rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const WordsPart words = (bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded;
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i pairs = _mm256_packus_epi32((__m256i)words, (__m256i)words);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0xd8)));
#else
    const HalvesPart halves = __builtin_convertvector(words, HalvesPart);
    std::memcpy(to, &halves, sizeof(halves));
#endif
}

inline FloatPart broadcast_part(float x) { return x - FloatPart{}; }  // x + 0 would need an addition: -0 + 0 is 0

inline float sum_of_part(FloatPart x) {
    float sum = 0.0f;
    for (int lane = 0; lane < PART_LANES; ++lane) sum += x[lane];
    return sum;
}

// A thread's numbers, which start at a cache line, because a load that crosses lines takes twice as long.
class Lines {
  public:
    // The content is lost if the size grows.
    float* resized(int64_t count) {
        constexpr int64_t LINE = 64;
        numbers_.resize(count + LINE / int64_t(sizeof(float)));
        const auto address = reinterpret_cast<uintptr_t>(numbers_.data());
        return numbers_.data() + (LINE - address % LINE) % LINE / sizeof(float);
    }

  private:
    std::vector<float> numbers_;
};

inline int64_t padded(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// Loads `count` numbers as float32, followed by zeros up to `size`. Without a source, all are zeros.
template <typename T>
inline void load_numbers(const T* from, int64_t count, float* to, int64_t size) {
    int64_t at = 0;
    if (from) {
        for (; at + PART_LANES <= count; at += PART_LANES) store_part(load_part(from + at), to + at);
        if (at < count) {
            T rest[PART_LANES] = {};
            std::memcpy(rest, from + at, (count - at) * sizeof(T));
            float numbers[PART_LANES];
            store_part(load_part(rest), numbers);
            for (int lane = 0; at < count; ++at, ++lane) to[at] = numbers[lane];
        }
    }
    for (; at < size; ++at) to[at] = 0.0f;
}
template <typename T>
inline void store_numbers(const float* from, int64_t count, T* to) {
    int64_t at = 0;
    for (; at + PART_LANES <= count; at += PART_LANES) store_part(load_part(from + at), to + at);
    if (at == count) return;
    float rest[PART_LANES] = {};
    std::memcpy(rest, from + at, (count - at) * sizeof(float));
    T numbers[PART_LANES];
    store_part(load_part(rest), numbers);
    std::memcpy(to + at, numbers, (count - at) * sizeof(T));
}

// Like `store_numbers`, but bypasses the caches for whole lines. A state is not read again until the next step, after
// all of the model's weights. Not reading a line before it is overwritten saves a third of the traffic.
inline void stream_numbers(const float* from, int64_t count, float* to) {
#ifdef __AVX__
    if (count % LANES == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
        for (int64_t at = 0; at < count; at += 8) _mm256_stream_ps(to + at, _mm256_loadu_ps(from + at));
        return;
    }
#endif
    store_numbers(from, count, to);
}
// Call before other threads may read the numbers.
inline void end_streams() {
#ifdef __AVX__
    _mm_sfence();
#endif
}

// ---- The short convolution.

struct ConvolutionShape {
    int64_t num_channels, kernel_size;
    int64_t input_token, slot;  // strides in elements
    int64_t has_silu;
};

inline FloatPart silu(FloatPart x) {
    const FloatPart most = broadcast_part(87.0f);  // e^x is finite up to this
    return x / (exponential(-x > most ? most : -x) + 1.0f);
}

// Adjacent channels of a convolution.
template <typename T>
class Channels {
  public:
    static constexpr int64_t MOST = 128;

    Channels(const ConvolutionShape& shape, int64_t first, const T* weight, const T* bias)
        : shape_(shape), kernel_size_(shape.kernel_size), first_(first), count_(std::min(MOST, shape.num_channels - first)) {
        static thread_local Lines numbers;
        taps_ = numbers.resized((2 * kernel_size_ + 2) * MOST);
        std::fill_n(taps_, (2 * kernel_size_ + 2) * MOST, 0.0f);
        seen_ = taps_ + kernel_size_ * MOST;
        bias_ = seen_ + kernel_size_ * MOST;
        sums_ = bias_ + MOST;
        if (bias) load_numbers(bias + first, count_, bias_, MOST);
        static thread_local std::vector<float> rows;
        rows.resize(count_ * kernel_size_);
        load_numbers(weight + first * kernel_size_, count_ * kernel_size_, rows.data(), 0);
        for (int64_t channel = 0; channel < count_; ++channel)
            for (int64_t tap = 0; tap < kernel_size_; ++tap) taps_[tap * MOST + channel] = rows[channel * kernel_size_ + tap];
    }

    void compute(const T* inputs, States<T> states, const Pieces& pieces, T* outputs) const {
        for (const Piece& piece : pieces) {
            const int64_t num_tokens = piece.num_tokens, num_kept = kernel_size_ - 1;
            const auto offset = [&](int64_t kept) { return kept * shape_.num_channels + first_; };
            for (int64_t kept = 0; kept < num_kept; ++kept)
                load_numbers<T>(states.read(piece, offset(kept)), count_, seen(kept - num_kept), MOST);
            for (int64_t at = 0; at < num_tokens; ++at) {
                const int64_t token = piece.first_token + at;
                load_numbers(inputs + token * shape_.input_token + first_, count_, seen(at), MOST);
                sum(at);
                if (shape_.has_silu)
                    for (int64_t channel = 0; channel < count_; channel += PART_LANES)
                        store_part(silu(load_part(sums_ + channel)), sums_ + channel);
                store_numbers(sums_, count_, outputs + token * shape_.num_channels + first_);
            }
            for (int64_t kept = 0; kept < num_kept; ++kept)
                store_numbers(seen(num_tokens - num_kept + kept), count_, states.written(piece, offset(kept)));
        }
    }

  private:
    // Returns the inputs of the piece's token with index `at`. Only the last `kernel_size` are stored.
    float* seen(int64_t at) const { return seen_ + (at + kernel_size_) % kernel_size_ * MOST; }

    void sum(int64_t at) const {
        constexpr int WIDTH = 4;
        for (int64_t channel = 0; channel < count_; channel += WIDTH * PART_LANES) {
            FloatPart sums[WIDTH];
#pragma GCC unroll 4
            for (int part = 0; part < WIDTH; ++part) sums[part] = load_part(bias_ + channel + part * PART_LANES);
            for (int64_t tap = 0; tap < kernel_size_; ++tap) {
                const float *taps = taps_ + tap * MOST + channel, *inputs = seen(at + 1 - kernel_size_ + tap) + channel;
#pragma GCC unroll 4
                for (int part = 0; part < WIDTH; ++part)
                    sums[part] += load_part(taps + part * PART_LANES) * load_part(inputs + part * PART_LANES);
            }
#pragma GCC unroll 4
            for (int part = 0; part < WIDTH; ++part) store_part(sums[part], sums_ + channel + part * PART_LANES);
        }
    }

    const ConvolutionShape& shape_;
    const int64_t kernel_size_, first_, count_;
    float *taps_, *seen_, *bias_, *sums_;
};

// The operators below run on all threads of a pool, inside its `run`.
template <typename T>
void convolve_in(ThreadPool& threads, const ConvolutionShape& shape, const T* inputs, const T* weight, const T* bias,
                 T* states, const Pieces& pieces, T* outputs) {
    threads.share_runs((shape.num_channels + Channels<T>::MOST - 1) / Channels<T>::MOST, [&](int64_t task) {
        const Channels<T> channels(shape, task * Channels<T>::MOST, weight, bias);
        channels.compute(inputs, {states, shape.slot}, pieces, outputs);
    });
}

// ---- Heads: the gated delta rule, Mamba 1 and Mamba 2.

// In Mamba, C is the query, B the key and the input the value (Gu & Dao, arXiv 2312.00752; Dao & Gu, arXiv 2405.21060).
// Mamba 1 has a single head, whose value has a number per channel.
struct RecurrenceShape {
    int64_t num_key_heads, num_value_heads, key_dim, value_dim;
    int64_t slot;  // stride in elements
    int64_t normalises;
    float scale;
};

// The queries, keys and values in a step's packed row.
template <typename T>
struct HeadRows {
    Heads<const T> query, key, value;
};

// Calls body(head, first, end) for parts of all heads' value dimensions, which the threads share. Parts start at
// multiples of `unit`. There are just enough to give each thread several tasks, because each part prepares the keys.
template <typename Body>
void share_heads(ThreadPool& threads, const RecurrenceShape& shape, int64_t unit, Body&& body) {
    constexpr int64_t TASKS = 4;  // the least tasks per thread, so that all threads finish at nearly the same time
    const int64_t num_units = (shape.value_dim + unit - 1) / unit, wanted = TASKS * threads.size();
    const int64_t num_parts = std::min(num_units, (wanted + shape.num_value_heads - 1) / shape.num_value_heads);
    threads.share_runs(shape.num_value_heads * num_parts, [&](int64_t task) {
        const int64_t head = task / num_parts, part = task % num_parts;
        body(head, num_units * part / num_parts * unit,
             std::min(shape.value_dim, num_units * (part + 1) / num_parts * unit));
    });
}

// Some tokens of a key head in float32, padded with zeros to whole registers. They stay in the L2 cache.
template <typename T>
class PreparedRows {
  public:
    static constexpr int32_t MOST = 256;  // tokens

    void prepare(const RecurrenceShape& shape, const HeadRows<T>& rows, int64_t value_head, const Piece& tokens) {
        size_ = padded(shape.key_dim, PART_LANES);
        numbers_ = lines_.resized(2 * MOST * size_);
        const int64_t head = value_head / (shape.num_value_heads / shape.num_key_heads);
        for (int64_t at = 0; at < tokens.num_tokens; ++at) {
            const int64_t token = tokens.first_token + at;
            load_numbers(rows.query.at(token, head), shape.key_dim, query(at), size_);
            load_numbers(rows.key.at(token, head), shape.key_dim, key(at), size_);
            multiply(query(at), (shape.normalises ? inverse_length(query(at)) : 1.0f) * shape.scale);
            if (shape.normalises) multiply(key(at), inverse_length(key(at)));
        }
    }

    float* query(int64_t at) { return numbers_ + 2 * at * size_; }
    float* key(int64_t at) { return query(at) + size_; }
    int64_t size() const { return size_; }

  private:
    static constexpr float EPSILON = 1e-6f;  // as in recurrence.py

    float inverse_length(const float* row) const {
        FloatPart squares = {};
        for (int64_t at = 0; at < size_; at += PART_LANES) squares += load_part(row + at) * load_part(row + at);
        return 1.0f / std::sqrt(sum_of_part(squares) + EPSILON);
    }
    void multiply(float* row, float factor) const {
        for (int64_t at = 0; at < size_; at += PART_LANES) store_part(load_part(row + at) * factor, row + at);
    }

    int64_t size_ = 0;
    Lines lines_;
    float* numbers_ = nullptr;
};

// Calls body for each piece, in parts of as many tokens as are prepared together. A later part continues from the slot
// that the previous one has written.
template <typename T, typename Body>
void in_parts(const Pieces& pieces, Body&& body) {
    constexpr int32_t MOST = PreparedRows<T>::MOST;
    for (const Piece& piece : pieces)
        for (int32_t at = 0; at < piece.num_tokens; at += MOST)
            body(Piece{piece.first_token + at, std::min(MOST, piece.num_tokens - at),
                       at ? piece.written_slot : piece.read_slot, piece.written_slot});
}

// Registers of a state's columns that are computed together: sums stay in registers, and columns in the L1 cache.
constexpr int STRIP = 4;
constexpr int64_t STRIP_COLUMNS = STRIP * PART_LANES;

// Computes one token of the gated delta rule for a strip of columns, [num_rows][STRIP_COLUMNS]. numbers: the values,
// replaced by the outputs. A column's product with the key has two sums, of even and odd rows, to shorten the latency.
inline __attribute__((noinline)) void delta_rule_token(float* state, int64_t num_rows, const float* query, const float* key,
                                                       float decay, float beta, float* numbers) {
    FloatPart even[STRIP] = {}, odd[STRIP] = {}, change[STRIP], output[STRIP] = {};
    const auto add = [&](FloatPart(&sums)[STRIP], int64_t row) {
        const FloatPart own = broadcast_part(key[row]);
#pragma GCC unroll 4
        for (int part = 0; part < STRIP; ++part)
            sums[part] += load_part(state + row * STRIP_COLUMNS + part * PART_LANES) * own;
    };
    for (int64_t row = 0; row + 1 < num_rows; row += 2) add(even, row), add(odd, row + 1);
    if (num_rows % 2) add(even, num_rows - 1);
#pragma GCC unroll 4
    for (int part = 0; part < STRIP; ++part)
        change[part] = (load_part(numbers + part * PART_LANES) - (even[part] + odd[part]) * decay) * beta;
    for (int64_t row = 0; row < num_rows; ++row) {
        const FloatPart own_key = broadcast_part(key[row]), own_query = broadcast_part(query[row]);
#pragma GCC unroll 4
        for (int part = 0; part < STRIP; ++part) {
            float* const place = state + row * STRIP_COLUMNS + part * PART_LANES;
            const FloatPart next = load_part(place) * decay + change[part] * own_key;
            store_part(next, place);
            output[part] += next * own_query;
        }
    }
#pragma GCC unroll 4
    for (int part = 0; part < STRIP; ++part) store_part(output[part], numbers + part * PART_LANES);
}

// Computes some columns of a head. decay, beta: [num_tokens][num_value_heads].
template <typename T>
void delta_rule_columns(const RecurrenceShape& shape, const HeadRows<T>& rows, const float* decay, const float* beta,
                        States<float> states, const Pieces& pieces, int64_t head, int64_t first, int64_t end,
                        Heads<T> outputs) {
    static thread_local PreparedRows<T> prepared;
    static thread_local Lines lines;
    const int64_t num_strips = (end - first + STRIP_COLUMNS - 1) / STRIP_COLUMNS, strip_size = shape.key_dim * STRIP_COLUMNS;
    float* const state = lines.resized(num_strips * strip_size);
    // Calls body(own, place in the slot, count) for each row's numbers in each strip, in the order of the slot.
    const auto each_run = [&](auto&& body) {
        for (int64_t row = 0; row < shape.key_dim; ++row)
            for (int64_t strip = 0; strip < num_strips; ++strip)
                body(state + strip * strip_size + row * STRIP_COLUMNS, row * shape.value_dim + strip * STRIP_COLUMNS,
                     std::min(STRIP_COLUMNS, end - first - strip * STRIP_COLUMNS));
    };
    in_parts<T>(pieces, [&](const Piece& tokens) {
        prepared.prepare(shape, rows, head, tokens);
        const int64_t offset = head * shape.key_dim * shape.value_dim + first;
        const float* const source = states.read(tokens, offset);
        each_run([&](float* own, int64_t place, int64_t count) {
            load_numbers(source ? source + place : nullptr, count, own, STRIP_COLUMNS);
        });
        for (int64_t column = first; column < end; column += STRIP_COLUMNS) {
            float* const strip = state + (column - first) * shape.key_dim;
            const int64_t count = std::min(STRIP_COLUMNS, end - column);
            for (int64_t at = 0; at < tokens.num_tokens; ++at) {
                const int64_t token = tokens.first_token + at, own = token * shape.num_value_heads + head;
                float numbers[STRIP_COLUMNS];
                load_numbers(rows.value.at(token, head) + column, count, numbers, STRIP_COLUMNS);
                delta_rule_token(strip, shape.key_dim, prepared.query(at), prepared.key(at),
                                 exponential(broadcast_part(decay[own]))[0], beta[own], numbers);
                store_numbers(numbers, count, outputs.at(token, head) + column);
            }
        }
        float* const target = states.written(tokens, offset);
        each_run([&](const float* own, int64_t place, int64_t count) { stream_numbers(own, count, target + place); });
    });
    end_streams();
}

template <typename T>
void delta_rule_in(ThreadPool& threads, const RecurrenceShape& shape, const HeadRows<T>& rows, const float* decay,
                   const float* beta, float* states, const Pieces& pieces, T* outputs) {
    const Heads<T> heads{outputs, shape.num_value_heads * shape.value_dim, shape.value_dim};
    share_heads(threads, shape, STRIP_COLUMNS, [&](int64_t head, int64_t first, int64_t end) {
        delta_rule_columns<T>(shape, rows, decay, beta, {states, shape.slot}, pieces, head, first, end, heads);
    });
}

// Rows of a Mamba state that are computed together: the rows stay in the L1 cache, and their sums in registers.
constexpr int64_t STATE_ROWS = 16;
constexpr int ROWS_OF_SUMS = 4;

// Computes one token for rows of a state, [STATE_ROWS][size]. numbers: each row's factor of the key, replaced by its
// product with the query. decay(row, at) returns the decay of a register of a row.
template <typename Decay>
inline void scan_token(float* state, int64_t size, const float* query, const float* key, Decay&& decay, float* numbers) {
    for (int64_t first = 0; first < STATE_ROWS; first += ROWS_OF_SUMS) {
        FloatPart sums[ROWS_OF_SUMS] = {}, change[ROWS_OF_SUMS];
#pragma GCC unroll 4
        for (int row = 0; row < ROWS_OF_SUMS; ++row) change[row] = broadcast_part(numbers[first + row]);
        for (int64_t at = 0; at < size; at += PART_LANES) {
            const FloatPart own_key = load_part(key + at), own_query = load_part(query + at);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS_OF_SUMS; ++row) {
                float* const place = state + (first + row) * size + at;
                const FloatPart next = load_part(place) * decay(first + row, at) + change[row] * own_key;
                store_part(next, place);
                sums[row] += next * own_query;
            }
        }
#pragma GCC unroll 4
        for (int row = 0; row < ROWS_OF_SUMS; ++row) numbers[first + row] = sum_of_part(sums[row]);
    }
}
inline __attribute__((noinline)) void mamba1_token(float* state, int64_t size, const float* query, const float* key,
                                                   const float* decay, const float* time_steps, float* numbers) {
    scan_token(state, size, query, key, [&](int64_t row, int64_t at) {
        return exponential(load_part(decay + row * size + at) * time_steps[row]);
    }, numbers);
}
inline __attribute__((noinline)) void mamba2_token(float* state, int64_t size, const float* query, const float* key,
                                                   float decay, float* numbers) {
    scan_token(state, size, query, key, [=](int64_t, int64_t) { return decay; }, numbers);
}

// Mamba 1: time_steps [num_tokens][num_channels], decay [num_channels][state_size], skip [num_channels].
struct Mamba1 {
    const float *time_steps, *decay, *skip;

    // The parameters of some rows of the state.
    class Rows {
      public:
        Rows(const Mamba1& own, const RecurrenceShape& shape, int64_t, int64_t begin, int64_t count, int64_t size)
            : own_(own), num_channels_(shape.value_dim), begin_(begin), count_(count) {
            static thread_local Lines lines;
            decay_ = lines.resized(STATE_ROWS * size);
            for (int64_t row = 0; row < STATE_ROWS; ++row)
                load_numbers(row < count ? own.decay + (begin + row) * shape.key_dim : nullptr, shape.key_dim,
                             decay_ + row * size, size);
            load_numbers(own.skip + begin, count, skip_, STATE_ROWS);
        }
        // numbers: the inputs, replaced by the outputs.
        void compute(int64_t token, float* state, int64_t size, const float* query, const float* key,
                     float* numbers) const {
            float steps[STATE_ROWS], skipped[STATE_ROWS];
            load_numbers(own_.time_steps + token * num_channels_ + begin_, count_, steps, STATE_ROWS);
            for (int64_t row = 0; row < STATE_ROWS; ++row) {
                skipped[row] = numbers[row] * skip_[row];
                numbers[row] *= steps[row];
            }
            mamba1_token(state, size, query, key, decay_, steps, numbers);
            for (int64_t row = 0; row < STATE_ROWS; ++row) numbers[row] += skipped[row];
        }

      private:
        const Mamba1& own_;
        const int64_t num_channels_, begin_, count_;
        float* decay_;
        float skip_[STATE_ROWS];
    };
};

// Mamba 2: time_steps [num_tokens][num_value_heads], decay and skip [num_value_heads].
struct Mamba2 {
    const float *time_steps, *decay, *skip;

    class Rows {
      public:
        Rows(const Mamba2& own, const RecurrenceShape& shape, int64_t head, int64_t, int64_t, int64_t)
            : own_(own), num_heads_(shape.num_value_heads), head_(head) {}
        void compute(int64_t token, float* state, int64_t size, const float* query, const float* key,
                     float* numbers) const {
            const float time_step = own_.time_steps[token * num_heads_ + head_], skip = own_.skip[head_];
            float inputs[STATE_ROWS];
            for (int64_t row = 0; row < STATE_ROWS; ++row) {
                inputs[row] = numbers[row];
                numbers[row] *= time_step;
            }
            mamba2_token(state, size, query, key, exponential(broadcast_part(time_step * own_.decay[head_]))[0], numbers);
            for (int64_t row = 0; row < STATE_ROWS; ++row) numbers[row] += inputs[row] * skip;
        }

      private:
        const Mamba2& own_;
        const int64_t num_heads_, head_;
    };
};

// Computes some rows of a head.
template <typename T, typename Mamba>
void scan_rows(const RecurrenceShape& shape, const HeadRows<T>& rows, const Mamba& own, States<float> states,
               const Pieces& pieces, int64_t head, int64_t first, int64_t end, Heads<T> outputs) {
    static thread_local PreparedRows<T> prepared;
    static thread_local Lines lines;
    in_parts<T>(pieces, [&](const Piece& tokens) {
        prepared.prepare(shape, rows, head, tokens);
        const int64_t size = prepared.size();
        float* const state = lines.resized(STATE_ROWS * size);
        for (int64_t begin = first; begin < end; begin += STATE_ROWS) {
            const int64_t count = std::min(STATE_ROWS, end - begin);
            const int64_t offset = (head * shape.value_dim + begin) * shape.key_dim;
            const float* const source = states.read(tokens, offset);
            for (int64_t row = 0; row < STATE_ROWS; ++row)
                load_numbers(source && row < count ? source + row * shape.key_dim : nullptr, shape.key_dim,
                             state + row * size, size);
            const typename Mamba::Rows own_rows(own, shape, head, begin, count, size);
            for (int64_t at = 0; at < tokens.num_tokens; ++at) {
                const int64_t token = tokens.first_token + at;
                float numbers[STATE_ROWS];
                load_numbers(rows.value.at(token, head) + begin, count, numbers, STATE_ROWS);
                own_rows.compute(token, state, size, prepared.query(at), prepared.key(at), numbers);
                store_numbers(numbers, count, outputs.at(token, head) + begin);
            }
            float* const target = states.written(tokens, offset);
            for (int64_t row = 0; row < count; ++row)
                stream_numbers(state + row * size, shape.key_dim, target + row * shape.key_dim);
        }
    });
    end_streams();
}

template <typename T, typename Mamba>
void scan_in(ThreadPool& threads, const RecurrenceShape& shape, const HeadRows<T>& rows, const Mamba& own, float* states,
             const Pieces& pieces, T* outputs) {
    const Heads<T> heads{outputs, shape.num_value_heads * shape.value_dim, shape.value_dim};
    share_heads(threads, shape, STATE_ROWS, [&](int64_t head, int64_t first, int64_t end) {
        scan_rows<T>(shape, rows, own, {states, shape.slot}, pieces, head, first, end, heads);
    });
}

}  // namespace carousel
