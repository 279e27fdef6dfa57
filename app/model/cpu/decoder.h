// All layers of a Llama-like decoder in one call.
//
// Numbers are rounded where transformers rounds them, so that bfloat16 gives the tokens that its own forward gives as
// far as the order of summation allows.
#pragma once

#include "adapters.h"
#include "attention.h"
#include "experts.h"
#include "quantised.h"
#include "thread_pool.h"

namespace carousel {

struct DecoderShape {
    int64_t hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size, block_size,
        num_layers, weight_bits;  // weight_bits: of the layers' matrices; 0: they and the head are of the model's type
    float epsilon, scaling;
    ExpertsShape experts;
};

struct MlpWeights {
    const uint32_t* gate_up;  // LANES outputs of gate and the LANES of up at the same place, in turn
    const uint32_t* down;
};

struct LayerWeights {  // norms in the model's type, matrices packed, biases in float32; null where there is none
    const void* input_norm;
    const uint32_t* query_key_value;  // outputs of the three one after the other
    const float* query_key_value_bias;
    const void *query_norm, *key_norm;  // [head_dim]
    const uint32_t* output;
    const float* output_bias;
    const void* post_attention_norm;
    const uint32_t* router;  // never quantised; null where there are no experts
    const MlpWeights* mlps;  // one, or one for each expert
    void *keys, *values;
    float* scales;  // of keys and values in int8; null where they are of the model's type
    int64_t sliding_window;  // 0: none
};

struct DecoderStep {
    int64_t num_tokens, num_segments, num_rows, num_logits;
    const int64_t* token_ids;  // [num_tokens]
    const int64_t* positions;  // [num_tokens]
    const int64_t* slots;      // [num_tokens]
    const Segment* segments;
    const int32_t* tables;
    const int64_t* rows;         // [num_rows], ascending: the tokens of which anything is wanted
    const int64_t* logits_rows;  // [num_logits], ascending: the rows of which logits are wanted
    const void *cosine, *sine;   // [num_positions][head_dim]
    float* logits;               // [num_logits][vocab_size]
    int64_t* likeliest;          // [num_logits], the first of the greatest logits of each
    float* hidden;               // [num_rows][hidden_size], behind the final norm; null: all rows have logits instead
    int64_t num_adapters;
    const AdapterLayer* const* adapters;  // [num_adapters][num_layers]
    const int64_t* adapter_of;            // [num_tokens]; -1: none
};

template <typename T>
class Decoder {
  public:
    Decoder(const DecoderShape& shape, const LayerWeights* layers, const void* embedding, const void* final_norm,
            const uint32_t* head, ThreadPool& threads)
        : shape_(shape), layers_(layers, layers + shape.num_layers), embedding_(static_cast<const T*>(embedding)),
          final_norm_(static_cast<const T*>(final_norm)), head_(head), threads_(threads),
          query_size_(shape.num_heads * shape.head_dim), kv_size_(shape.num_kv_heads * shape.head_dim),
          projected_size_(query_size_ + 2 * kv_size_), routing_(shape.experts) {}

    void run(const DecoderStep& step) {
        grow(step.num_tokens);
        const AttentionShape shape = attention_shape(0);
        groups_.find(step.segments, step.num_segments, step.tables, shape, rows_together<T>(shape).most, threads_.size());
        find_adapted(step);
        threads_.run([&] { work(step); });
    }

  private:
    // The work of every thread of the pool; all loops in it are shared.
    void work(const DecoderStep& step) {
        embed(step);
        int64_t num_rows = step.num_tokens;
        const AdaptedRows* adapted = &adapted_;
        for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
            const auto added = [&](LowRank AdapterLayer::* product, const Parts& parts) {
                return Addition<T>(*adapted, step.adapters, step.num_adapters, layer, product, parts, low_.data());
            };
            const bool is_last = layer + 1 == shape_.num_layers;
            attention(step, layers_[layer], added(&AdapterLayer::query_key_value, {{query_size_, kv_size_, kv_size_}}));
            if (is_last) {  // from here on only the wanted rows are computed
                keep_rows(step);
                num_rows = step.num_rows;
                adapted = &adapted_wanted_;
            }
            const LayerWeights& own = layers_[layer];
            add_projection(attended_.data(), num_rows, output(own), own.output_bias,
                           own.router ? Matrix{} : gate_up(own.mlps[0]), added(&AdapterLayer::output, {{shape_.hidden_size}}));
            const Matrix next = is_last ? head() : query_key_value(layers_[layer + 1]);
            feed_forward(own, num_rows, next,
                         added(&AdapterLayer::gate_up, {{shape_.intermediate_size, shape_.intermediate_size}, true}),
                         added(&AdapterLayer::down, {{shape_.hidden_size}}));
        }
        normalise(final_norm_, num_rows, 0);
        if (step.hidden) {
            give_hidden(step);
            num_rows = step.num_logits;
        }
        compute_logits(step, num_rows);
    }

    Matrix head() const { return {head_, shape_.hidden_size, shape_.vocab_size}; }
    Matrix query_key_value(const LayerWeights& layer) const {
        return {layer.query_key_value, shape_.hidden_size, projected_size_};
    }
    Matrix output(const LayerWeights& layer) const { return {layer.output, query_size_, shape_.hidden_size}; }
    Matrix gate_up(const MlpWeights& mlp) const {
        return {mlp.gate_up, shape_.hidden_size, 2 * shape_.intermediate_size};
    }
    Matrix down(const MlpWeights& mlp) const { return {mlp.down, shape_.intermediate_size, shape_.hidden_size}; }

    void embed(const DecoderStep& step) {
        threads_.share(step.num_tokens, [&](int64_t row) { embed(step.token_ids[row], residual(row)); });
    }

    void embed(int64_t token, float* to) const {
        if (!embedding_ && shape_.weight_bits) return read_column<HEAD_BITS>(head(), token, to);
        if (!embedding_) return read_column<T>(head(), token, to);
        const T* from = embedding_ + token * shape_.hidden_size;
        for (int64_t at = 0; at < shape_.hidden_size; at += LANES) store(load(from + at), to + at);
    }

    AttentionShape attention_shape(int64_t sliding_window) const {
        return {shape_.num_heads,  shape_.num_kv_heads, shape_.head_dim, shape_.head_dim, shape_.block_size,
                shape_.scaling, 0.0f,                sliding_window,  nullptr};
    }

    void attention(const DecoderStep& step, const LayerWeights& layer, const Addition<T>& added) {
        const AttentionShape shape = attention_shape(layer.sliding_window);
        const Pages<T> pages(shape, layer.keys, layer.values, layer.scales);
        normalise(static_cast<const T*>(layer.input_norm), step.num_tokens, shape_.weight_bits);
        added.reduce(threads_, normed_.data(), shape_.hidden_size);
        linear(normed_.data(), step.num_tokens, query_key_value(layer), shape_.weight_bits, output(layer),
               [&](int64_t row, int64_t column, Vector left, Vector right) {
                   put(left, layer.query_key_value_bias, projected(row), column, projected_size_);
                   put(right, layer.query_key_value_bias, projected(row), column + LANES, projected_size_);
               },
               added);
        threads_.share(step.num_tokens, [&](int64_t token) { rotate_and_keep(step, layer, pages, token); });
        const Heads<const T> query{projected_.data(), projected_size_, shape_.head_dim};
        const Heads<T> output{attended_.data(), query_size_, shape_.head_dim};
        attend_in(threads_, shape, pages, groups_, step.tables, query, output);
    }

    // Rotary positions on a token's queries and keys; keys and values to KV memory.
    void rotate_and_keep(const DecoderStep& step, const LayerWeights& layer, const Pages<T>& pages, int64_t token) {
        const int64_t turn = step.positions[token] * shape_.head_dim;
        const T *cosine = static_cast<const T*>(step.cosine) + turn, *sine = static_cast<const T*>(step.sine) + turn;
        T* heads = projected(token);
        for (int64_t head = 0; head < shape_.num_heads + shape_.num_kv_heads; ++head) {
            T* own = heads + head * shape_.head_dim;
            const void* norm = head < shape_.num_heads ? layer.query_norm : layer.key_norm;
            if (norm) normalise_row(own, static_cast<const T*>(norm), shape_.head_dim, own);
            rotate(own, cosine, sine, shape_.head_dim / 2);
        }
        for (int64_t head = 0; head < shape_.num_kv_heads; ++head)
            pages.write(step.slots[token], head, heads + query_size_ + head * shape_.head_dim,
                        heads + query_size_ + kv_size_ + head * shape_.head_dim);
    }

    void rotate(T* own, const T* cosine, const T* sine, int64_t half) const {
        for (int64_t at = 0; at < half; at += LANES) {
            const int64_t count = std::min<int64_t>(LANES, half - at);
            const auto part = [&](const T* from) { return load_some(from + at, count); };
            const Vector x = part(own), y = part(own + half);
            const Vector left = kept(x * part(cosine)) - kept(y * part(sine));
            const Vector right = kept(y * part(cosine + half)) + kept(x * part(sine + half));
            store_some(rounded(left), own + at, count);
            store_some(rounded(right), own + half + at, count);
        }
    }

    void keep_rows(const DecoderStep& step) {
        threads_.share(1, [&](int64_t) {  // ascending, so no row is overwritten before it is moved
            for (int64_t row = 0; row < step.num_rows; ++row) {
                std::memmove(residual(row), residual(step.rows[row]), shape_.hidden_size * sizeof(float));
                std::memmove(attended_.data() + row * query_size_, attended_.data() + step.rows[row] * query_size_,
                             query_size_ * sizeof(T));
            }
        });
    }

    // Copies all normed rows to the step's `hidden`, then keeps those of which logits are wanted.
    void give_hidden(const DecoderStep& step) {
        const int64_t size = shape_.hidden_size;
        threads_.share(step.num_rows, [&](int64_t row) {
            const T* from = normed_.data() + row * size;
            for (int64_t at = 0; at < size; at += LANES) {
                const int64_t count = std::min<int64_t>(LANES, size - at);
                store_some(load_some(from + at, count), step.hidden + row * size + at, count);
            }
        });
        threads_.share(1, [&](int64_t) {
            for (int64_t row = 0; row < step.num_logits; ++row)
                std::memmove(normed_.data() + row * size, normed_.data() + step.logits_rows[row] * size,
                             size * sizeof(T));
        });
    }

    // next: the matrix that is read afterwards.
    void feed_forward(const LayerWeights& layer, int64_t num_rows, const Matrix& next,
                      const Addition<T>& added_to_gate_up, const Addition<T>& added_to_down) {
        // Rows of experts are rounded in the order of the experts.
        normalise(static_cast<const T*>(layer.post_attention_norm), num_rows, layer.router ? 0 : shape_.weight_bits);
        if (layer.router)
            mix_experts(layer, num_rows);
        else
            run_mlp(layer.mlps[0], num_rows, next, added_to_gate_up, added_to_down);
    }

    void run_mlp(const MlpWeights& mlp, int64_t num_rows, const Matrix& next, const Addition<T>& added_to_gate_up,
                 const Addition<T>& added_to_down) {
        added_to_gate_up.reduce(threads_, normed_.data(), shape_.hidden_size);
        linear(normed_.data(), num_rows, gate_up(mlp), shape_.weight_bits, down(mlp),
               [&](int64_t row, int64_t column, Vector gate, Vector up) {
                   store(activated(gate, up), activated_.data() + row * shape_.intermediate_size + column / 2);
               },
               added_to_gate_up);
        add_projection(activated_.data(), num_rows, down(mlp), nullptr, next, added_to_down);
    }

    Vector activated(Vector gate, Vector up) const {
        gate = kept(gate);
        const Vector bounded = greater_of(Vector{} - 87.0f, gate);  // e^x of more is infinite; a NaN stays
        return rounded(kept(gate / (1.0f + exponential(-bounded))) * kept(up));
    }

    // residual += the experts' outputs times their weights, in the order of the weights.
    void mix_experts(const LayerWeights& layer, int64_t num_rows) {
        const int64_t hidden = shape_.hidden_size, size = shape_.experts.intermediate_size;
        multiply<T>(threads_, normed_.data(), num_rows, {layer.router, hidden, shape_.experts.num_experts},
                    [&](int64_t row, int64_t column, Vector left, Vector right) {
                        store(rounded(left), routing_.logits(row) + column);
                        store(rounded(right), routing_.logits(row) + column + LANES);
                    });
        threads_.share(num_rows, [&](int64_t row) { routing_.template choose<T>(row); });
        threads_.meet();  // the number of groups is read outside of loops
        threads_.share(1, [&](int64_t) { routing_.group(num_rows); });
        threads_.share(num_rows, [&](int64_t row) {
            for (int64_t choice = 0; choice < shape_.experts.per_token; ++choice)
                std::memcpy(at_place(routing_.place(row, choice)), normed_.data() + row * hidden, hidden * sizeof(T));
        });
        const int64_t num_places = num_rows * shape_.experts.per_token;
        linear_by_expert(by_expert_.data(), num_places, hidden, 2 * size,
                         [&](int64_t expert) { return layer.mlps[expert].gate_up; },
                         [&](int64_t place, int64_t column, Vector gate, Vector up) {
                             store(activated(gate, up), activated_.data() + place * size + column / 2);
                         });
        linear_by_expert(activated_.data(), num_places, size, hidden,
                         [&](int64_t expert) { return layer.mlps[expert].down; },
                         [&](int64_t place, int64_t column, Vector left, Vector right) {
                             put(left, nullptr, at_place(place), column, hidden);
                             put(right, nullptr, at_place(place), column + LANES, hidden);
                         });
        threads_.share(num_rows, [&](int64_t row) { add_experts(row); });
    }

    void add_experts(int64_t row) {
        for (int64_t column = 0; column < shape_.hidden_size; column += LANES) {
            Vector sums = {};
            for (int64_t choice = 0; choice < shape_.experts.per_token; ++choice) {
                const Vector part = load(at_place(routing_.place(row, choice)) + column) * routing_.weight(row, choice);
                sums += shape_.experts.rounds_weights ? rounded(part) : part;
            }
            add(sums, nullptr, residual(row), column);
        }
    }

    void compute_logits(const DecoderStep& step, int64_t num_rows) {
        const int64_t bits = shape_.weight_bits ? HEAD_BITS : 0, size = shape_.vocab_size;
        prepare(normed_.data(), num_rows, shape_.hidden_size, bits);
        fetch_in_pauses(Matrix{}, num_rows);
        multiply_prepared(threads_, normed_.data(), 0, num_rows, head(), bits,
                          [&](int64_t row, int64_t column, Vector left, Vector right) {
                              const Vector both[2] = {kept(left), kept(right)};
                              std::memcpy(step.logits + row * size + column, both,
                                          std::min<int64_t>(PANEL, size - column) * sizeof(float));
                          });
        threads_.share(num_rows, [&](int64_t row) {
            step.likeliest[row] = first_greatest(step.logits + row * size, size);
        });
    }

    // As `linear`, with the matrix of its expert for each place. The threads share the columns of all experts together:
    // one expert alone has too few of them.
    template <typename MatrixOf, typename Finish>
    void linear_by_expert(const T* inputs, int64_t num_places, int64_t num_inputs, int64_t num_columns,
                          MatrixOf&& matrix_of, Finish&& finish) {
        prepare(inputs, num_places, num_inputs, shape_.weight_bits);
        const int64_t num_parts = (num_columns + PANEL - 1) / PANEL;
        threads_.share(routing_.rows().size() * num_parts, [&](int64_t task) {
            const Routing::Rows& rows = routing_.rows()[task / num_parts];
            const Matrix matrix{matrix_of(rows.expert), num_inputs, num_columns};
            const auto finish_place = [&](int64_t row, int64_t column, Vector left, Vector right) {
                finish(rows.first + row, column, left, right);
            };
            LoopPart part{task % num_parts, num_parts};
            multiply_prepared(part, inputs, rows.first, rows.count, matrix, shape_.weight_bits, finish_place);
        });
    }

    // Calls finish(row, column, left, right) with inputs × matrix, as `multiply`. The inputs are prepared already.
    // bits: of the weights; 0: not quantised. next: the matrix that is read afterwards.
    template <typename Finish>
    void linear(const T* inputs, int64_t num_rows, const Matrix& matrix, int64_t bits, const Matrix& next,
                Finish&& finish, const Addition<T>& added) {
        fetch_in_pauses(next, num_rows);
        multiply_prepared(threads_, inputs, 0, num_rows, matrix, bits, finish, added);
    }

    // With few rows the time of a step is that of reading the weights, so a thread that waits for others goes on reading:
    // what it multiplies first of the next matrix comes into its cache.
    void fetch_in_pauses(const Matrix& next, int64_t num_rows) {
        constexpr int64_t FEW_ROWS = 8, MOST = 1 << 17;  // bytes, of an L2 cache of 512 KiB or more
        const bool is_head = next.panels == head_;
        const int64_t units = units_of(next.num_inputs, shape_.weight_bits && is_head ? HEAD_BITS : shape_.weight_bits);
        const ThreadPool::Part part = threads_.own_run((next.num_columns + PANEL - 1) / PANEL);
        const int64_t size = num_rows <= FEW_ROWS ? (part.end - part.first) * units * PANEL * sizeof(uint32_t) : 0;
        threads_.fetch_in_pauses(next.panels + part.first * units * PANEL, std::min(size, MOST));
    }

    // Of a packed column of so many bits.
    static int64_t units_of(int64_t num_inputs, int64_t bits) {
        return bits == 8 ? panel_units<8>(num_inputs) : bits == 4 ? panel_units<4>(num_inputs) : num_inputs / PER_UNIT<T>;
    }

    // Rounds the inputs of a quantised matrix.
    void prepare(const T* inputs, int64_t num_rows, int64_t size, int64_t bits) {
        if (bits == 0) return;
        threads_.share(num_rows, [&](int64_t row) { prepare_row(inputs, row, size, bits); });
    }
    void prepare_row(const T* inputs, int64_t row, int64_t size, int64_t bits) {
        if (bits == 8) quantise<8>(inputs + row * size, size, quantised_rows(), row);
        if (bits == 4) quantise<4>(inputs + row * size, size, quantised_rows(), row);
    }

    // The rows from `first` on of what was prepared.
    template <typename Sharing, typename Finish, typename Added = NothingAdded>
    void multiply_prepared(Sharing& threads, const T* inputs, int64_t first, int64_t num_rows, const Matrix& matrix,
                           int64_t bits, Finish&& finish, const Added& added = {}) {
        const int64_t size = matrix.num_inputs;
        if (bits == 8)
            multiply_quantised<8>(threads, rows_from<8>(quantised_rows(), first, size), num_rows, matrix, finish, added);
        else if (bits == 4)
            multiply_quantised<4>(threads, rows_from<4>(quantised_rows(), first, size), num_rows, matrix, finish, added);
        else
            multiply<T>(threads, inputs + first * size, num_rows, matrix, finish, added);
    }

    QuantisedRows quantised_rows() { return {input_numbers_.data(), input_scales_.data(), input_sums_.data()}; }

    // residual += inputs × matrix, and what adapters add
    void add_projection(const T* inputs, int64_t num_rows, const Matrix& matrix, const float* bias, const Matrix& next,
                        const Addition<T>& added) {
        added.reduce(threads_, inputs, matrix.num_inputs);
        prepare(inputs, num_rows, matrix.num_inputs, shape_.weight_bits);
        fetch_in_pauses(next, num_rows);
        multiply_prepared(threads_, inputs, 0, num_rows, matrix, shape_.weight_bits,
                          [&](int64_t row, int64_t column, Vector left, Vector right) {
                              add(left, bias, residual(row), column);
                              add(right, bias, residual(row), column + LANES);
                          },
                          added);
    }

    void add(Vector sums, const float* bias, float* row, int64_t column) const {
        if (column >= shape_.hidden_size) return;
        if (bias) sums += load(bias + column);
        store(kept(load(row + column) + kept(sums)), row + column);
    }

    static void put(Vector sums, const float* bias, T* row, int64_t column, int64_t num_columns) {
        if (column >= num_columns) return;
        if (bias) sums += load(bias + column);
        store(round_to(sums, T{}), row + column);
    }

    // residual → normed, prepared for a matrix of so many bits.
    void normalise(const T* weight, int64_t num_rows, int64_t bits) {
        threads_.share(num_rows, [&](int64_t row) {
            normalise_row(residual(row), weight, shape_.hidden_size, normed_.data() + row * shape_.hidden_size);
            prepare_row(normed_.data(), row, shape_.hidden_size, bits);
        });
    }

    // RMSNorm (Zhang & Sennrich, 2019).
    template <typename From>
    void normalise_row(const From* row, const T* weight, int64_t size, T* to) const {
        Vector squares = {};
        for (int64_t at = 0; at < size; at += LANES) squares += load(row + at) * load(row + at);
        const float scale = 1.0f / std::sqrt(sum_of(squares) / float(size) + shape_.epsilon);
        for (int64_t at = 0; at < size; at += LANES)
            store(round_to(load(weight + at) * kept(load(row + at) * scale), T{}), to + at);
    }

    static Vector rounded(Vector x) { return round_to(x, T{}); }

    // With quantised weights, residuals, logits and whatever stays in registers keep float32: rounding would cost as
    // much again as the weights do.
    Vector kept(Vector x) const { return shape_.weight_bits ? x : rounded(x); }

    float* residual(int64_t token) { return residual_.data() + token * shape_.hidden_size; }
    T* at_place(int64_t place) { return by_expert_.data() + place * shape_.hidden_size; }
    T* projected(int64_t token) { return projected_.data() + token * projected_size_; }

    void find_adapted(const DecoderStep& step) {
        if (step.num_adapters == 0) return;
        low_.resize(std::max<size_t>(low_.size(), step.num_tokens * LOW_STRIDE));
        adapted_.find(step.num_tokens, step.num_adapters, [&](int64_t row) { return step.adapter_of[row]; });
        adapted_wanted_.find(step.num_rows, step.num_adapters,
                             [&](int64_t row) { return step.adapter_of[step.rows[row]]; });
    }

    void grow(int64_t num_tokens) {
        if (num_tokens <= capacity_) return;
        capacity_ = num_tokens;
        residual_.resize(num_tokens * shape_.hidden_size);
        normed_.resize(num_tokens * shape_.hidden_size);
        projected_.resize(num_tokens * projected_size_);
        attended_.resize(num_tokens * query_size_);
        const int64_t num_places = num_tokens * shape_.experts.per_token, inner = shape_.experts.intermediate_size;
        activated_.resize(std::max(num_tokens * shape_.intermediate_size, num_places * inner));
        by_expert_.resize(num_places * shape_.hidden_size);
        routing_.grow(num_tokens);
        if (!shape_.weight_bits) return;
        const int64_t num_rows = std::max(num_tokens, num_places);
        const int64_t size = std::max({shape_.hidden_size, query_size_, shape_.intermediate_size, inner});
        input_numbers_.resize(num_rows * num_groups<8>(size) * Grouping<8>::SIZE);
        input_scales_.resize(num_rows * num_groups<4>(size));
        input_sums_.resize(num_rows * num_groups<4>(size));
    }

    const DecoderShape shape_;
    const std::vector<LayerWeights> layers_;
    const T* const embedding_;
    const T* const final_norm_;
    const uint32_t* const head_;
    ThreadPool& threads_;
    const int64_t query_size_, kv_size_, projected_size_;
    Groups groups_;         // of the step
    AdaptedRows adapted_, adapted_wanted_;  // all rows of the step, and those that are left in the last layer
    int64_t capacity_ = 0;  // tokens that the buffers hold
    Routing routing_;       // of the layer
    std::vector<float> residual_;  // of the model's numbers, where its weights are not quantised
    std::vector<T> normed_, projected_, attended_, activated_;
    std::vector<T> low_;  // [num_tokens][LOW_STRIDE], of adapters, in the product that is being computed
    std::vector<T> by_expert_;  // [num_places][hidden_size], inputs and then outputs of experts
    std::vector<int8_t> input_numbers_;  // of the matrix that is being multiplied, where weights are quantised
    std::vector<float> input_scales_, input_sums_;
};

}  // namespace carousel
