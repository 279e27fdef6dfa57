// Runs all layers of a Llama-like decoder in one call.
//
// Numbers are rounded where transformers rounds them, so that bfloat16 yields the tokens of transformers' forward pass,
// except for differences due to the order of summation.
#pragma once

#include "adapters.h"
#include "attention.h"
#include "experts.h"
#include "quantised.h"
#include "recurrence.h"
#include "stored.h"
#include "thread_pool.h"

namespace carousel {

// How a layer mixes tokens, in the order of `MIXERS` in decoder.py.
enum Mixer : int64_t { ATTENTION, SHORT_CONVOLUTION, GATED_DELTA_RULE };
constexpr int NUM_MIXERS = 3;

// Each layer's inputs in addition to the residual, which are a row of a table plus a projection of the embedding.
struct PerLayerShape {
    int64_t size, total_size;    // for one layer and for all layers; 0 without such inputs
    const void* embedding;       // the model's type, [vocab_size][total_size]; packed if weights are quantised
    const uint32_t* projection;  // applied to a token's embedding
    const float* norm;           // [size], applied to the projected inputs
    float embedding_scale, projection_scale, sum_scale;
};

struct DecoderShape {
    int64_t hidden_size, num_heads, vocab_size, block_size, num_layers;
    // Bits of the layers' matrices, or 0 if these and the head have the model's type. With IN_GROUPS, IN_BLOCKS or
    // both, all matrices keep the types of a file, and their inputs are rounded in these ways.
    int64_t weight_bits;
    int64_t num_groups;           // groups of layers, which use different blocks
    int64_t gates_attention;      // extra outputs of the query projection gate attention's output
    int64_t norms_all_heads;      // the queries of all heads are normalised together, and so are the keys
    int64_t norms_values;         // each head's values are normalised, without weights
    int64_t rounds_in_norms;      // normalised numbers are rounded before the weight is applied
    int64_t rounds_rotary;        // products with cosines and sines are rounded
    int64_t has_gelu;             // GELU in its tanh form, instead of SiLU
    float epsilon, scaling;
    float softcap, logits_softcap;  // 0 for none
    float embedding_scale;
    PerLayerShape per_layer;
    ExpertsShape experts;
    ConvolutionShape convolution;  // reads a token's inputs from `projected`
    RecurrenceShape delta_rule;
};

struct MlpWeights {
    const uint32_t* gate_up;  // alternates LANES outputs of gate and LANES of up
    const uint32_t* down;
};

// Norms and biases are float32, and matrices are packed. Weights that the layer lacks are null.
struct LayerWeights {
    int64_t mixer, intermediate_size;
    const float *mixer_input_norm, *mixer_output_norm, *feed_forward_input_norm, *feed_forward_output_norm;
    // The mixer's joined input projections. Their outputs are:
    //   attention          queries, gates, keys, values
    //   short convolution  factors of inputs, factors of outputs, inputs
    //   delta rule         queries, keys, values, gates
    const uint32_t* projection;
    const float* projection_bias;
    const uint32_t* output;
    const float* output_bias;
    // For attention.
    const float *query_norm, *key_norm;  // [head_dim], or spanning all heads
    void *keys, *values;
    float* scales;                         // of keys and values in int8; null if they have the model's type
    int64_t heads_in_block, scales_in_block;  // as in `AttentionShape`
    int64_t num_kv_heads, head_dim;
    int64_t num_kv_projections;            // 2; 1 if values are keys; 0 if another layer's are read
    int64_t sliding_window, group;         // window 0 for none
    int64_t rotary, rotary_dim;            // table of positions, and the rotated numbers of a head
    // For the recurrent mixers.
    const void *taps, *tap_biases;         // the model's type: [channels][kernel_size], [channels]
    void* convolution_states;              // [slots][kernel_size - 1][channels]
    const uint32_t* rates;                 // never quantised; outputs beta, then the decay's input, of each head
    const float *decay, *decay_bias;       // [heads]
    const float* gate_norm;                // [value_dim]
    float* delta_states;                   // [slots][heads][key_dim][value_dim]
    // After the feed-forward part.
    const uint32_t *per_layer_gate, *per_layer_projection;
    const float* per_layer_norm;
    const float* output_scale;             // a factor for all outputs; null for none
    // For the feed-forward part.
    const uint32_t* router;  // never quantised; null without experts
    const MlpWeights* mlps;  // one MLP, or one for each expert
};

struct DecoderStep {
    int64_t num_tokens, num_segments, num_pieces, num_rows, num_logits;
    const int64_t* token_ids;       // [num_tokens]
    const int64_t* positions;       // [num_tokens]
    const int64_t* const* slots;    // [num_groups][num_tokens]
    const Segment* segments;
    const int32_t* const* tables;   // [num_groups]
    const Piece* pieces;            // for the recurrent layers
    const int64_t* rows;            // [num_rows], ascending: the tokens that need any result
    const int64_t* logits_rows;     // [num_logits], ascending: the rows that need logits
    const float* const* rotary;     // by table: [num_positions][2][rotary_dim / 2], cosines, then sines
    float* logits;                  // [num_logits][vocab_size]
    int64_t* likeliest;             // [num_logits], the first of each row's greatest logits
    float* hidden;                  // [num_rows][hidden_size], after the final norm; null if all rows need only logits
    int64_t num_adapters;
    const AdapterLayer* const* adapters;  // [num_adapters][num_layers]
    const int64_t* adapter_of;            // [num_tokens]; -1 for none
};

template <typename T>
class Decoder {
  public:
    Decoder(const DecoderShape& shape, const LayerWeights* layers, const void* embedding, const float* final_norm,
            const uint32_t* head, ThreadPool& threads)
        : shape_(shape), layers_(layers, layers + shape.num_layers), embedding_(embedding),
          final_norm_(final_norm), head_(head), threads_(threads),
          keys_size_(shape.delta_rule.num_key_heads * shape.delta_rule.key_dim),
          values_size_(shape.delta_rule.num_value_heads * shape.delta_rule.value_dim),
          rates_size_((2 * shape.delta_rule.num_value_heads + PANEL - 1) / PANEL * PANEL), routing_(shape.experts) {
        most_inner_ = shape.per_layer.size;
        for (const LayerWeights& layer : layers_) {
            const bool stores = layer.mixer != ATTENTION || layer.num_kv_projections;
            if (stores) last_to_store_ = &layer - layers_.data();
            kind_of_.push_back(layer.mixer == ATTENTION ? kind_of(layer) : -1);
            most_inner_ = std::max(most_inner_, layer.intermediate_size);
            most_projected_ = std::max(most_projected_, projected_size(layer));
            most_mixed_ = std::max(most_mixed_, mixed_size(layer));
            has_delta_rule_ |= layer.mixer == GATED_DELTA_RULE;
        }
    }

    void run(const DecoderStep& step) {
        grow(step.num_tokens);
        find_wanted(step);
        for (AttentionKind& kind : kinds_) {
            const auto find = [&](Groups& groups, const Segment* segments, int64_t num_segments) {
                groups.find(segments, num_segments, step.tables[kind.group], kind.shape,
                            rows_together<T>(kind.shape).most, threads_.size());
            };
            find(kind.groups, step.segments, step.num_segments);
            find(kind.wanted, wanted_.data(), wanted_.size());
        }
        find_adapted(step);
        threads_.run([&] { work(step); });
    }

  private:
    // Layers that share a shape of heads and a group of blocks.
    struct AttentionKind {
        int64_t group;
        AttentionShape shape;  // without a window
        Groups groups, wanted;  // over all tokens of the step, and only over its wanted rows
    };

    // The rows that a layer computes: all tokens, or only the wanted rows.
    struct Rows {
        int64_t count;
        const int64_t* wanted;
        bool are_all;
        int64_t token(int64_t row) const { return are_all ? row : wanted[row]; }
    };

    // Finds the wanted rows, each of which is a segment. Layers after the last one that stores anything compute only
    // these.
    void find_wanted(const DecoderStep& step) {
        wanted_.clear();
        if (last_to_store_ + 1 == shape_.num_layers || step.num_rows == step.num_tokens) return;
        const Segment* own = step.segments;
        for (int32_t row = 0; row < step.num_rows; ++row) {
            const auto token = int32_t(step.rows[row]);
            while (token >= own->first_token + own->num_tokens) ++own;
            wanted_.push_back({row, 1, own->start + token - own->first_token, own->table_offset});
        }
    }

    // Returns the layer's index in `kinds_`, adding a kind if needed.
    int64_t kind_of(const LayerWeights& layer) {
        const auto is_same = [&](const AttentionKind& kind) {
            return kind.group == layer.group && kind.shape.num_kv_heads == layer.num_kv_heads &&
                   kind.shape.key_dim == layer.head_dim;
        };
        const auto found = std::find_if(kinds_.begin(), kinds_.end(), is_same);
        const int64_t index = found - kinds_.begin();
        if (found == kinds_.end()) kinds_.push_back({layer.group, attention_shape(layer, 0), {}});
        return index;
    }

    // Runs on every thread of the pool. The threads share all loops in it.
    void work(const DecoderStep& step) {
        embed(step);
        Rows rows{step.num_tokens, step.rows, true};
        const AdaptedRows* adapted = &adapted_;
        for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
            const auto added = [&](LowRank AdapterLayer::* product, const Parts& parts) {
                return Addition<T>(*adapted, step.adapters, step.num_adapters, layer, product, parts, low_.data());
            };
            const bool is_last = layer + 1 == shape_.num_layers;
            const LayerWeights& own = layers_[layer];
            mix(step, layer, rows, added(&AdapterLayer::query_key_value, {{query_outputs(own), kv_size(own), kv_size(own)}}));
            if (layer == last_to_store_) {  // from here on, compute only the wanted rows
                keep_rows(step, mixed_size(own));
                if (step.num_rows == 0) return;  // nothing that follows is stored or wanted
                rows = {step.num_rows, step.rows, step.num_rows == step.num_tokens};
                adapted = &adapted_wanted_;
            }
            add_projection(mixed_.data(), rows.count, output(own), own.output_bias, own.mixer_output_norm,
                           own.router ? Matrix{} : gate_up(own), added(&AdapterLayer::output, {{shape_.hidden_size}}));
            const Matrix next = is_last ? head() : projection(layers_[layer + 1]);
            feed_forward(own, rows.count, own.per_layer_gate ? per_layer_gate(own) : next,
                         added(&AdapterLayer::gate_up, {{own.intermediate_size, own.intermediate_size}, true}),
                         added(&AdapterLayer::down, {{shape_.hidden_size}}));
            if (own.per_layer_gate) add_per_layer_inputs(own, layer, rows, next);
            if (own.output_scale) scale_residual(*own.output_scale, rows.count);
        }
        normalise(final_norm_, step.num_rows, 0);
        if (step.hidden) give_hidden(step);
        compute_logits(step, step.hidden ? step.num_logits : step.num_rows);
    }

    // Return the numbers per token that a layer's mixer reads, and that it outputs.
    int64_t projected_size(const LayerWeights& layer) const {
        const int64_t sizes[NUM_MIXERS] = {query_outputs(layer) + (layer.num_kv_projections ? 2 : 0) * kv_size(layer),
                                           3 * shape_.hidden_size, 2 * keys_size_ + 2 * values_size_};
        return sizes[layer.mixer];
    }
    int64_t mixed_size(const LayerWeights& layer) const {
        const int64_t sizes[NUM_MIXERS] = {query_size(layer), shape_.hidden_size, values_size_};
        return sizes[layer.mixer];
    }
    // Return the numbers in a token's queries, in its queries with gates, and in its keys.
    int64_t query_size(const LayerWeights& layer) const { return shape_.num_heads * layer.head_dim; }
    int64_t query_outputs(const LayerWeights& layer) const {
        return query_size(layer) * (shape_.gates_attention ? 2 : 1);
    }
    static int64_t kv_size(const LayerWeights& layer) { return layer.num_kv_heads * layer.head_dim; }

    Matrix head() const { return {head_, shape_.hidden_size, shape_.vocab_size}; }
    Matrix projection(const LayerWeights& layer) const {
        // If values are keys, the keys are copied to the place of the values.
        const int64_t copied = layer.mixer == ATTENTION && layer.num_kv_projections == 1 ? kv_size(layer) : 0;
        return {layer.projection, shape_.hidden_size, projected_size(layer) - copied};
    }
    Matrix output(const LayerWeights& layer) const { return {layer.output, mixed_size(layer), shape_.hidden_size}; }
    Matrix gate_up(const LayerWeights& layer) const {
        return {layer.mlps[0].gate_up, shape_.hidden_size, 2 * layer.intermediate_size};
    }
    Matrix down(const LayerWeights& layer) const {
        return {layer.mlps[0].down, layer.intermediate_size, shape_.hidden_size};
    }
    Matrix per_layer_gate(const LayerWeights& layer) const {
        return {layer.per_layer_gate, shape_.hidden_size, shape_.per_layer.size};
    }

    void embed(const DecoderStep& step) {
        threads_.share(step.num_tokens, [&](int64_t row) {
            float* const to = residual(row);
            embed(step.token_ids[row], to);
            if (shape_.embedding_scale == 1.0f) return;
            for (int64_t at = 0; at < shape_.hidden_size; at += LANES)
                store(kept(load(to + at) * shape_.embedding_scale), to + at);
        });
        if (shape_.per_layer.size) find_per_layer_inputs(step);
    }

    void embed(int64_t token, float* to) const {
        if (!embedding_) return look_up(head_, shape_.hidden_size, token, to);
        if (is_stored(shape_.weight_bits))
            return look_up(static_cast<const uint32_t*>(embedding_), shape_.hidden_size, token, to);
        const T* from = static_cast<const T*>(embedding_) + token * shape_.hidden_size;
        for (int64_t at = 0; at < shape_.hidden_size; at += LANES) store(load(from + at), to + at);
    }

    // Reads a token's row in a packed table.
    void look_up(const uint32_t* table, int64_t size, int64_t token, float* to) const {
        const Matrix matrix{table, size, shape_.vocab_size};
        if (is_stored(shape_.weight_bits)) return read_stored_column<T>(matrix, token, to);
        if (shape_.weight_bits) return read_column<HEAD_BITS>(matrix, token, to);
        read_column<T>(matrix, token, to);
    }

    // residual → per_layer, for all tokens and all layers of the model.
    void find_per_layer_inputs(const DecoderStep& step) {
        const PerLayerShape& own = shape_.per_layer;
        normalise(nullptr, step.num_tokens, shape_.weight_bits);
        linear(normed_.data(), step.num_tokens, {own.projection, shape_.hidden_size, own.total_size}, shape_.weight_bits,
               projection(layers_[0]),
               [&](int64_t row, int64_t column, Vector left, Vector right) {
                   T* const to = per_layer_.data() + row * own.total_size;
                   put(kept(left) * own.projection_scale, nullptr, to, column, own.total_size);
                   put(kept(right) * own.projection_scale, nullptr, to, column + LANES, own.total_size);
               },
               {});
        threads_.share(step.num_tokens, [&](int64_t token) {
            static thread_local std::vector<float> looked_up;
            looked_up.resize(own.total_size);
            look_up(step.token_ids[token], looked_up.data());
            T* const to = per_layer_.data() + token * own.total_size;
            for (int64_t first = 0; first < own.total_size; first += own.size) {
                normalise_row(to + first, own.norm, own.size, to + first);
                for (int64_t at = first; at < first + own.size; at += LANES) {
                    const Vector scaled = kept(apart(load(looked_up.data() + at) * own.embedding_scale));
                    store(rounded(kept(load(to + at) + scaled) * own.sum_scale), to + at);
                }
            }
        });
    }

    // Reads a token's row in the table of per-layer inputs.
    void look_up(int64_t token, float* to) const {
        const PerLayerShape& own = shape_.per_layer;
        if (shape_.weight_bits)
            return look_up(static_cast<const uint32_t*>(own.embedding), own.total_size, token, to);
        const T* const from = static_cast<const T*>(own.embedding) + token * own.total_size;
        for (int64_t at = 0; at < own.total_size; at += LANES) store(load(from + at), to + at);
    }

    // residual += norm(projection(gate(residual) × the layer's inputs)).
    void add_per_layer_inputs(const LayerWeights& layer, int64_t index, const Rows& rows, const Matrix& next) {
        const PerLayerShape& own = shape_.per_layer;
        const Matrix projection{layer.per_layer_projection, own.size, shape_.hidden_size};
        normalise(nullptr, rows.count, shape_.weight_bits);
        linear(normed_.data(), rows.count, per_layer_gate(layer), shape_.weight_bits, projection,
               [&](int64_t row, int64_t column, Vector left, Vector right) {
                   const T* const of_token = per_layer_.data() + rows.token(row) * own.total_size;
                   const T* const inputs = of_token + index * own.size + column;
                   T* const to = activated_.data() + row * own.size + column;
                   if (column < own.size) store(activated(left, load(inputs)), to);
                   if (column + LANES < own.size) store(activated(right, load(inputs + LANES)), to + LANES);
               },
               {});
        add_projection(activated_.data(), rows.count, projection, nullptr, layer.per_layer_norm, next, {});
    }

    void scale_residual(float scale, int64_t num_rows) {
        threads_.share(num_rows, [&](int64_t row) {
            float* const own = residual(row);
            for (int64_t at = 0; at < shape_.hidden_size; at += LANES) store(kept(load(own + at) * scale), own + at);
        });
    }

    AttentionShape attention_shape(const LayerWeights& layer, int64_t sliding_window) const {
        return {shape_.num_heads, layer.num_kv_heads, layer.head_dim, layer.head_dim, shape_.block_size,
                shape_.scaling,   shape_.softcap,     sliding_window, nullptr,
                layer.heads_in_block, layer.scales_in_block, 0};
    }

    // residual → projected → mixed
    void mix(const DecoderStep& step, int64_t index, const Rows& rows, const Addition<T>& added_to_attention) {
        const LayerWeights& layer = layers_[index];
        const Addition<T> added = layer.mixer == ATTENTION ? added_to_attention : Addition<T>();
        const Matrix inputs = projection(layer);
        const int64_t size = projected_size(layer);
        normalise(layer.mixer_input_norm, rows.count, shape_.weight_bits);
        added.reduce(threads_, normed_.data(), shape_.hidden_size);
        linear(normed_.data(), rows.count, inputs, shape_.weight_bits, output(layer),
               [&](int64_t row, int64_t column, Vector left, Vector right) {
                   T* const to = projected_.data() + row * size;
                   put(left, layer.projection_bias, to, column, inputs.num_columns);
                   put(right, layer.projection_bias, to, column + LANES, inputs.num_columns);
               },
               added);
        if (layer.mixer == ATTENTION) attention(step, layer, rows, kinds_[kind_of_[index]]);
        if (layer.mixer == SHORT_CONVOLUTION) short_convolution(step, layer);
        if (layer.mixer == GATED_DELTA_RULE) delta_rule(step, layer);
    }

    void attention(const DecoderStep& step, const LayerWeights& layer, const Rows& rows, AttentionKind& kind) {
        const AttentionShape shape = attention_shape(layer, layer.sliding_window);
        const Pages<T> pages(shape, layer.keys, layer.values, layer.scales);
        const int64_t size = query_size(layer);
        threads_.share(rows.count, [&](int64_t row) { rotate_and_keep(step, layer, pages, row, rows.token(row)); });
        const Heads<const T> query{projected_.data(), projected_size(layer), layer.head_dim};
        const Heads<T> output{mixed_.data(), size, layer.head_dim};
        attend_in(threads_, shape, pages, rows.are_all ? kind.groups : kind.wanted, step.tables[layer.group], query, output);
        if (shape_.gates_attention)
            threads_.share(rows.count, [&](int64_t row) {
                T* const own = mixed_.data() + row * size;
                const T* const gates = projected(layer, row) + size;
                for (int64_t at = 0; at < size; at += LANES)
                    store(rounded(load(own + at) * kept(times_sigmoid(Vector{} + 1.0f, load(gates + at)))), own + at);
            });
    }

    // Normalises and rotates a token's queries and keys, and stores its keys and values.
    void rotate_and_keep(const DecoderStep& step, const LayerWeights& layer, const Pages<T>& pages, int64_t row,
                         int64_t token) {
        const float* const cosines = step.rotary[layer.rotary] + step.positions[token] * layer.rotary_dim;
        T* const queries = projected(layer, row);
        prepare_heads(queries, shape_.num_heads, layer.head_dim, layer.query_norm, cosines, layer.rotary_dim / 2);
        if (layer.num_kv_projections == 0) return;
        T *const keys = queries + query_outputs(layer), *const values = keys + kv_size(layer);
        if (layer.num_kv_projections == 1) std::memcpy(values, keys, kv_size(layer) * sizeof(T));
        prepare_heads(keys, layer.num_kv_heads, layer.head_dim, layer.key_norm, cosines, layer.rotary_dim / 2);
        for (int64_t at = 0; at < kv_size(layer); at += layer.head_dim) {
            if (shape_.norms_values) normalise_row(values + at, nullptr, layer.head_dim, values + at);
            pages.write(step.slots[layer.group][token], at / layer.head_dim, keys + at, values + at);
        }
    }

    // Normalises and rotates heads. norm: null for none. half: half of a head's rotated numbers.
    void prepare_heads(T* heads, int64_t num_heads, int64_t head_dim, const float* norm, const float* cosines,
                       int64_t half) const {
        if (norm && shape_.norms_all_heads) normalise_row(heads, norm, num_heads * head_dim, heads);
        for (int64_t head = 0; head < num_heads; ++head) {
            T* const own = heads + head * head_dim;
            if (norm && !shape_.norms_all_heads) normalise_row(own, norm, head_dim, own);
            rotate(own, cosines, cosines + half, half);
        }
    }

    void rotate(T* own, const float* cosines, const float* sines, int64_t half) const {
        const auto product = [&](Vector x, Vector y) {
            const Vector exact = apart(x * y);
            return shape_.rounds_rotary ? kept(exact) : exact;
        };
        for (int64_t at = 0; at < half; at += LANES) {
            const int64_t count = std::min<int64_t>(LANES, half - at);
            const Vector x = load_some(own + at, count), y = load_some(own + half + at, count);
            const Vector cosine = load_some(cosines + at, count), sine = load_some(sines + at, count);
            store_some(rounded(product(x, cosine) - product(y, sine)), own + at, count);
            store_some(rounded(product(y, cosine) + product(x, sine)), own + half + at, count);
        }
    }

    // Computes LFM2's short convolution, whose inputs and outputs are multiplied by factors.
    void short_convolution(const DecoderStep& step, const LayerWeights& layer) {
        const int64_t size = shape_.hidden_size;
        threads_.share(step.num_tokens, [&](int64_t token) {
            T* const own = projected(layer, token);
            multiply_row(own, own + 2 * size, size);
        });
        convolve(step, layer, mixed_.data());
        threads_.share(step.num_tokens, [&](int64_t token) {
            multiply_row(mixed_.data() + token * size, projected(layer, token) + size, size);
        });
    }

    void convolve(const DecoderStep& step, const LayerWeights& layer, T* outputs) {
        convolve_in(threads_, shape_.convolution, projected_.data(), static_cast<const T*>(layer.taps),
                    static_cast<const T*>(layer.tap_biases), static_cast<T*>(layer.convolution_states),
                    {step.pieces, step.num_pieces}, outputs);
    }

    static void multiply_row(T* own, const T* factors, int64_t size) {
        for (int64_t at = 0; at < size; at += LANES) store(rounded(load(own + at) * load(factors + at)), own + at);
    }

    // Computes Qwen3.5's delta rule, which follows a short convolution and is followed by a norm and gates.
    void delta_rule(const DecoderStep& step, const LayerWeights& layer) {
        const RecurrenceShape& shape = shape_.delta_rule;
        const int64_t channels = shape_.convolution.num_channels;
        multiply<T>(threads_, normed_.data(), step.num_tokens, {layer.rates, shape_.hidden_size, 2 * shape.num_value_heads},
                    [&](int64_t row, int64_t column, Vector left, Vector right) {
                        store(rounded(left), rates_.data() + row * rates_size_ + column);
                        store(rounded(right), rates_.data() + row * rates_size_ + column + LANES);
                    });
        threads_.share(step.num_tokens, [&](int64_t token) { find_rates(layer, token); });
        convolve(step, layer, convolved_.data());
        const T* const rows = convolved_.data();
        const HeadRows<T> heads{{rows, channels, shape.key_dim},
                                {rows + keys_size_, channels, shape.key_dim},
                                {rows + 2 * keys_size_, channels, shape.value_dim}};
        delta_rule_in<T>(threads_, shape, heads, decay_.data(), beta_.data(), layer.delta_states,
                         {step.pieces, step.num_pieces}, mixed_.data());
        threads_.share(step.num_tokens, [&](int64_t token) { gate_heads(layer, token); });
    }

    // Computes how much a token changes the state, and the logarithm of the state's decay.
    void find_rates(const LayerWeights& layer, int64_t token) {
        const int64_t num_heads = shape_.delta_rule.num_value_heads;
        const float* const rates = rates_.data() + token * rates_size_;
        for (int64_t head = 0; head < num_heads; ++head) {
            const Vector beta = kept(times_sigmoid(Vector{} + 1.0f, Vector{} + rates[head]));
            const float change = rates[num_heads + head] + layer.decay_bias[head];
            const float softplus = change > 20.0f ? change : std::log1p(std::exp(change));  // as in torch
            beta_[token * num_heads + head] = beta[0];
            decay_[token * num_heads + head] = layer.decay[head] * softplus;
        }
    }

    void gate_heads(const LayerWeights& layer, int64_t token) {
        const int64_t size = shape_.delta_rule.value_dim;
        const T* const gates = projected(layer, token) + shape_.convolution.num_channels;
        for (int64_t first = 0; first < values_size_; first += size) {
            T* const own = mixed_.data() + token * values_size_ + first;
            const float scale = norm_scale(own, size);
            for (int64_t at = 0; at < size; at += LANES) {
                const Vector normed = kept(load(layer.gate_norm + at) * kept(load(own + at) * scale));
                const Vector gate = load(gates + first + at);
                store(rounded(normed * times_sigmoid(gate, gate)), own + at);
            }
        }
    }

    // Moves the wanted rows to the front. size: of a row in `mixed_`.
    void keep_rows(const DecoderStep& step, int64_t size) {
        threads_.share(1, [&](int64_t) {  // in ascending order, so that no row is overwritten before it is moved
            for (int64_t row = 0; row < step.num_rows; ++row) {
                std::memmove(residual(row), residual(step.rows[row]), shape_.hidden_size * sizeof(float));
                std::memmove(mixed_.data() + row * size, mixed_.data() + step.rows[row] * size, size * sizeof(T));
            }
        });
    }

    // Copies all normalised rows to the step's `hidden`, then moves those that need logits to the front.
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

    // residual → residual. next: the matrix that is read afterwards, to prefetch.
    void feed_forward(const LayerWeights& layer, int64_t num_rows, const Matrix& next,
                      const Addition<T>& added_to_gate_up, const Addition<T>& added_to_down) {
        // Rows for experts are rounded later, when they have been sorted by expert.
        normalise(layer.feed_forward_input_norm, num_rows, layer.router ? 0 : shape_.weight_bits);
        if (layer.router)
            mix_experts(layer, num_rows);
        else
            run_mlp(layer, num_rows, next, added_to_gate_up, added_to_down);
    }

    void run_mlp(const LayerWeights& layer, int64_t num_rows, const Matrix& next, const Addition<T>& added_to_gate_up,
                 const Addition<T>& added_to_down) {
        added_to_gate_up.reduce(threads_, normed_.data(), shape_.hidden_size);
        linear(normed_.data(), num_rows, gate_up(layer), shape_.weight_bits, down(layer),
               [&](int64_t row, int64_t column, Vector gate, Vector up) {
                   store(activated(gate, up), activated_.data() + row * layer.intermediate_size + column / 2);
               },
               added_to_gate_up);
        add_projection(activated_.data(), num_rows, down(layer), nullptr, layer.feed_forward_output_norm, next,
                       added_to_down);
    }

    Vector activated(Vector gate, Vector up) const {
        gate = kept(gate);
        Vector turns = gate;
        if (shape_.has_gelu) {  // x (1 + tanh u) / 2 equals x times the logistic function of 2 u
            constexpr float TWICE_SQRT_2_BY_PI = 1.59576912160573071f;
            turns = (gate + gate * gate * gate * 0.044715f) * TWICE_SQRT_2_BY_PI;
        }
        return rounded(kept(times_sigmoid(gate, turns)) * kept(up));
    }

    // Returns x times the logistic function of y.
    static Vector times_sigmoid(Vector x, Vector y) {
        const Vector bounded = greater_of(Vector{} - 87.0f, y);  // e^-y is infinite for lower y; a NaN stays a NaN
        return x / (1.0f + exponential(-bounded));
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
        threads_.meet();  // because the number of groups is read outside of loops
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
        const int64_t bits = head_bits(), size = shape_.vocab_size;
        prepare(normed_.data(), num_rows, shape_.hidden_size, bits);
        fetch_in_pauses(Matrix{}, num_rows);
        multiply_prepared(threads_, normed_.data(), 0, num_rows, head(), bits,
                          [&](int64_t row, int64_t column, Vector left, Vector right) {
                              const Vector both[2] = {capped(kept(left)), capped(kept(right))};
                              std::memcpy(step.logits + row * size + column, both,
                                          std::min<int64_t>(PANEL, size - column) * sizeof(float));
                          });
        threads_.share(num_rows, [&](int64_t row) {
            step.likeliest[row] = first_greatest(step.logits + row * size, size);
        });
    }

    Vector capped(Vector logits) const {
        const float most = shape_.logits_softcap;
        if (most == 0.0f) return logits;
        const Vector parts = kept(logits / most), one = Vector{} + 1.0f;
        return kept(kept(2.0f * times_sigmoid(one, 2.0f * parts) - one) * most);  // tanh x = 2 logistic(2 x) - 1
    }

    // Like `linear`, with a different matrix for each expert's places. The threads share the columns of all experts,
    // because a single expert has too few of them.
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

    // Calls finish(row, column, left, right) with inputs × matrix, like `multiply`. The inputs must have been prepared.
    // bits: of the weights, or 0 if not quantised. next: the matrix that is read afterwards, to prefetch.
    template <typename Finish>
    void linear(const T* inputs, int64_t num_rows, const Matrix& matrix, int64_t bits, const Matrix& next,
                Finish&& finish, const Addition<T>& added) {
        fetch_in_pauses(next, num_rows);
        multiply_prepared(threads_, inputs, 0, num_rows, matrix, bits, finish, added);
    }

    // With few rows, a step takes as long as reading the weights. A thread that waits for others therefore fetches the
    // weights that it will multiply first, in the next matrix, into its cache.
    void fetch_in_pauses(const Matrix& next, int64_t num_rows) {
        constexpr int64_t FEW_ROWS = 8, MOST = 1 << 17;  // bytes, for an L2 cache of 512 KiB or more
        const bool is_head = next.panels == head_;
        const int64_t units = units_of(next.num_inputs, is_head ? head_bits() : shape_.weight_bits);
        const ThreadPool::Part part = threads_.own_run((next.num_columns + PANEL - 1) / PANEL);
        int64_t size = num_rows <= FEW_ROWS ? (part.end - part.first) * units * PANEL * sizeof(uint32_t) : 0;
        const uint32_t* from = next.panels + part.first * units * PANEL;
        if (size > 0 && is_stored(shape_.weight_bits)) {
            from = stored_from(next, part.first * PANEL);
            size = (stored_from(next, (part.end - 1) * PANEL) - from) * sizeof(uint32_t);
        }
        threads_.fetch_in_pauses(from, std::min(size, MOST));
    }

    int64_t head_bits() const {
        return shape_.weight_bits == 0 || is_stored(shape_.weight_bits) ? shape_.weight_bits : HEAD_BITS;
    }

    // Returns the units of a packed column whose weights have `bits` bits.
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
        const bool in_groups = is_stored(bits) && bits & IN_GROUPS, in_blocks = is_stored(bits) && bits & IN_BLOCKS;
        if (bits == 4 || in_groups) quantise<4>(inputs + row * size, size, quantised_rows(), row);
        if (in_blocks && size % BLOCK == 0) quantise_blocks(inputs + row * size, size, block_rows(), row);
    }

    // Multiplies prepared rows from `first` on.
    template <typename Sharing, typename Finish, typename Added = NothingAdded>
    void multiply_prepared(Sharing& threads, const T* inputs, int64_t first, int64_t num_rows, const Matrix& matrix,
                           int64_t bits, Finish&& finish, const Added& added = {}) {
        const int64_t size = matrix.num_inputs;
        if (bits == 8)
            multiply_quantised<8>(threads, rows_from<8>(quantised_rows(), first, size), num_rows, matrix, finish, added);
        else if (bits == 4)
            multiply_quantised<4>(threads, rows_from<4>(quantised_rows(), first, size), num_rows, matrix, finish, added);
        else if (is_stored(bits))
            multiply_stored<T>(threads, inputs + first * size, rows_from({quantised_rows(), block_rows()}, first, size),
                               num_rows, matrix, finish, added);
        else
            multiply<T>(threads, inputs + first * size, num_rows, matrix, finish, added);
    }

    QuantisedRows quantised_rows() { return {input_numbers_.data(), input_scales_.data(), input_sums_.data()}; }
    BlockRows block_rows() { return {block_numbers_.data(), block_scales_.data(), block_sums_.data()}; }

    // residual += norm(inputs × matrix + adapters' updates). norm: null for none.
    void add_projection(const T* inputs, int64_t num_rows, const Matrix& matrix, const float* bias, const float* norm,
                        const Matrix& next, const Addition<T>& added) {
        added.reduce(threads_, inputs, matrix.num_inputs);
        prepare(inputs, num_rows, matrix.num_inputs, shape_.weight_bits);
        fetch_in_pauses(next, num_rows);
        multiply_prepared(threads_, inputs, 0, num_rows, matrix, shape_.weight_bits,
                          [&](int64_t row, int64_t column, Vector left, Vector right) {
                              if (norm) {
                                  put(left, bias, normed(row), column, shape_.hidden_size);
                                  put(right, bias, normed(row), column + LANES, shape_.hidden_size);
                                  return;
                              }
                              add(left, bias, residual(row), column);
                              add(right, bias, residual(row), column + LANES);
                          },
                          added);
        if (norm) threads_.share(num_rows, [&](int64_t row) { add_normed(norm, row); });
    }

    // residual += norm(normed), where `normed` holds the sum in place of the inputs, which are no longer needed.
    void add_normed(const float* norm, int64_t row) {
        normalise_row(normed(row), norm, shape_.hidden_size, normed(row));
        for (int64_t at = 0; at < shape_.hidden_size; at += LANES) add(load(normed(row) + at), nullptr, residual(row), at);
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

    // residual → normed, prepared for a matrix of `bits` bits. weight: null for no norm.
    void normalise(const float* weight, int64_t num_rows, int64_t bits) {
        threads_.share(num_rows, [&](int64_t row) {
            if (weight)
                normalise_row(residual(row), weight, shape_.hidden_size, normed(row));
            else
                for (int64_t at = 0; at < shape_.hidden_size; at += LANES)
                    store(rounded(load(residual(row) + at)), normed(row) + at);
            prepare_row(normed_.data(), row, shape_.hidden_size, bits);
        });
    }

    // RMSNorm (Zhang & Sennrich, 2019). weight: null for ones.
    template <typename From>
    void normalise_row(const From* row, const float* weight, int64_t size, T* to) const {
        const float scale = norm_scale(row, size);
        for (int64_t at = 0; at < size; at += LANES) {
            const Vector scaled = load(row + at) * scale;
            const Vector normed = shape_.rounds_in_norms ? kept(scaled) : scaled;
            store(rounded(weight ? load(weight + at) * normed : normed), to + at);
        }
    }

    template <typename From>
    float norm_scale(const From* row, int64_t size) const {
        Vector squares = {};
        for (int64_t at = 0; at < size; at += LANES) squares += load(row + at) * load(row + at);
        return 1.0f / std::sqrt(sum_of(squares) / float(size) + shape_.epsilon);
    }

    static Vector rounded(Vector x) { return round_to(x, T{}); }

    // Keeps the compiler from fusing a product with an addition, which would round differently in some builds.
    Vector apart(Vector product) const { return (Vector)((Words)product ^ nothing_); }

    // Rounds, unless weights are quantised: rounding residuals, logits and numbers in registers would then cost as much
    // accuracy again as the weights do.
    Vector kept(Vector x) const { return shape_.weight_bits ? x : rounded(x); }

    float* residual(int64_t token) { return residual_.data() + token * shape_.hidden_size; }
    T* at_place(int64_t place) { return by_expert_.data() + place * shape_.hidden_size; }
    T* normed(int64_t row) { return normed_.data() + row * shape_.hidden_size; }
    T* projected(const LayerWeights& layer, int64_t token) { return projected_.data() + token * projected_size(layer); }

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
        projected_.resize(num_tokens * most_projected_);
        mixed_.resize(num_tokens * most_mixed_);
        if (has_delta_rule_) {
            convolved_.resize(num_tokens * shape_.convolution.num_channels);
            rates_.resize(num_tokens * rates_size_);
            decay_.resize(num_tokens * shape_.delta_rule.num_value_heads);
            beta_.resize(num_tokens * shape_.delta_rule.num_value_heads);
        }
        const int64_t num_places = num_tokens * shape_.experts.per_token, inner = shape_.experts.intermediate_size;
        activated_.resize(std::max(num_tokens * most_inner_, num_places * inner));
        per_layer_.resize(num_tokens * shape_.per_layer.total_size);
        by_expert_.resize(num_places * shape_.hidden_size);
        routing_.grow(num_tokens);
        if (!shape_.weight_bits) return;
        // Tiles of stored matrices may read beyond the last row.
        const int64_t num_rows = std::max(num_tokens, num_places) + (is_stored(shape_.weight_bits) ? STRIP_ROWS : 0);
        const int64_t size = std::max({shape_.hidden_size, most_mixed_, most_inner_, inner});
        input_numbers_.resize(num_rows * num_groups<8>(size) * Grouping<8>::SIZE);
        input_scales_.resize(num_rows * num_groups<4>(size));
        input_sums_.resize(num_rows * num_groups<4>(size));
        if (!is_stored(shape_.weight_bits) || !(shape_.weight_bits & IN_BLOCKS)) return;
        block_numbers_.resize(num_rows * size);
        block_scales_.resize(num_rows * size / BLOCK);
        block_sums_.resize(num_rows * size / BLOCK * SUM_WORDS);
    }

    const DecoderShape shape_;
    const std::vector<LayerWeights> layers_;
    const void* const embedding_;
    const float* const final_norm_;
    const uint32_t* const head_;
    ThreadPool& threads_;
    const int64_t keys_size_, values_size_, rates_size_;
    int64_t most_projected_ = 0, most_mixed_ = 0, most_inner_ = 0;  // over all layers
    bool has_delta_rule_ = false;
    uint32_t nothing_ = 0;  // always 0, but the compiler cannot know
    std::vector<AttentionKind> kinds_;
    std::vector<Segment> wanted_;  // of the step
    int64_t last_to_store_ = 0;    // the last layer that stores keys and values, or a state
    std::vector<int64_t> kind_of_;  // by layer; meaningless for layers without attention
    AdaptedRows adapted_, adapted_wanted_;  // for all rows, and for the wanted rows
    int64_t capacity_ = 0;  // the tokens that fit in the buffers
    Routing routing_;       // of the current layer
    std::vector<float> residual_;  // rounded to the model's type unless weights are quantised
    std::vector<T> normed_, projected_, convolved_, mixed_, activated_;
    std::vector<T> per_layer_;  // [num_tokens][total_size]
    std::vector<float> rates_, decay_, beta_;  // of the delta rule
    std::vector<T> low_;  // [num_tokens][LOW_STRIDE], for the current product's adapters
    std::vector<T> by_expert_;  // [num_places][hidden_size], experts' inputs, then their outputs
    std::vector<int8_t> input_numbers_;  // the current matrix's inputs, if weights are quantised
    std::vector<float> input_scales_, input_sums_;
    std::vector<int8_t> block_numbers_;  // the inputs in blocks, for stored matrices
    std::vector<float> block_scales_;
    std::vector<uint32_t> block_sums_;
};

}  // namespace carousel
