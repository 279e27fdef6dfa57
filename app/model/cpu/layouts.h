// Reports how this compiler lays out the structures that Python fills. library.py compares this with its own layouts on
// loading: a field that only one side declares would shift the memory that the other side reads.
#pragma once

#include <cstddef>
#include <cstdio>
#include <initializer_list>
#include <string>

#include "decoder.h"
#include "recurrence.h"
#include "sampling.h"

namespace carousel {

struct Field {
    const char* name;
    size_t offset, size;
};

// Returns a line with a structure's name and size, and each field's name, offset and size.
inline std::string layout(const char* name, size_t size, std::initializer_list<Field> fields) {
    char numbers[64];  // not std::to_string, which shares a table with other libraries in the process
    std::snprintf(numbers, sizeof(numbers), " %zu", size);
    std::string line = std::string(name) + numbers;
    for (const Field& field : fields) {
        std::snprintf(numbers, sizeof(numbers), " %zu %zu", field.offset, field.size);
        line += std::string(" ") + field.name + numbers;
    }
    return line + "\n";
}

#define CAROUSEL_FIELD(NAME) Field{#NAME, offsetof(Struct, NAME), sizeof(Struct::NAME)}
#define CAROUSEL_LAYOUT(NAME, ...)                           \
    [] {                                                     \
        using Struct = NAME;                                 \
        return layout(#NAME, sizeof(Struct), {__VA_ARGS__}); \
    }()

inline const char* layouts() {
#define F CAROUSEL_FIELD
    static const std::string lines =
        CAROUSEL_LAYOUT(AttentionShape, F(num_heads), F(num_kv_heads), F(key_dim), F(value_dim), F(block_size),
                        F(scaling), F(softcap), F(sliding_window), F(sinks), F(heads_in_block), F(scales_in_block),
                        F(is_latent)) +
        CAROUSEL_LAYOUT(Strides, F(query_token), F(query_head), F(key_token), F(key_head), F(value_token),
                        F(value_head)) +
        CAROUSEL_LAYOUT(ExpertsShape, F(num_experts), F(per_token), F(intermediate_size), F(weights_sum_to_one),
                        F(rounds_weights)) +
        CAROUSEL_LAYOUT(PerLayerShape, F(size), F(total_size), F(embedding), F(projection), F(norm), F(embedding_scale),
                        F(projection_scale), F(sum_scale)) +
        CAROUSEL_LAYOUT(DecoderShape, F(hidden_size), F(num_heads), F(vocab_size), F(block_size), F(num_layers), F(weight_bits),
                        F(num_groups), F(gates_attention), F(norms_all_heads), F(norms_values), F(rounds_in_norms),
                        F(rounds_rotary), F(has_gelu), F(epsilon), F(scaling), F(softcap), F(logits_softcap),
                        F(embedding_scale), F(per_layer), F(experts), F(convolution), F(delta_rule)) +
        CAROUSEL_LAYOUT(MlpWeights, F(gate_up), F(down)) +
        CAROUSEL_LAYOUT(LayerWeights, F(mixer), F(intermediate_size), F(mixer_input_norm), F(mixer_output_norm), F(feed_forward_input_norm),
                        F(feed_forward_output_norm), F(projection), F(projection_bias), F(output), F(output_bias),
                        F(query_norm), F(key_norm), F(keys), F(values), F(scales), F(heads_in_block), F(scales_in_block), F(num_kv_heads), F(head_dim),
                        F(num_kv_projections), F(sliding_window), F(group), F(rotary), F(rotary_dim), F(taps), F(tap_biases), F(convolution_states), F(rates), F(decay), F(decay_bias),
                        F(gate_norm), F(delta_states), F(per_layer_gate), F(per_layer_projection), F(per_layer_norm),
                        F(output_scale), F(router), F(mlps)) +
        CAROUSEL_LAYOUT(LowRank, F(down), F(up), F(rank)) +
        CAROUSEL_LAYOUT(AdapterLayer, F(query_key_value), F(output), F(gate_up), F(down)) +
        CAROUSEL_LAYOUT(DecoderStep, F(num_tokens), F(num_segments), F(num_pieces), F(num_rows), F(num_logits),
                        F(token_ids), F(positions), F(slots), F(segments), F(tables), F(pieces), F(rows), F(logits_rows),
                        F(rotary), F(logits), F(likeliest), F(hidden), F(num_adapters), F(adapters), F(adapter_of)) +
        CAROUSEL_LAYOUT(Segment, F(first_token), F(num_tokens), F(start), F(table_offset)) +
        CAROUSEL_LAYOUT(Piece, F(first_token), F(num_tokens), F(read_slot), F(written_slot)) +
        CAROUSEL_LAYOUT(ConvolutionShape, F(num_channels), F(kernel_size), F(input_token), F(slot), F(has_silu)) +
        CAROUSEL_LAYOUT(RecurrenceShape, F(num_key_heads), F(num_value_heads), F(key_dim), F(value_dim), F(slot),
                        F(normalises), F(scale)) +
        CAROUSEL_LAYOUT(Draw, F(position), F(seed), F(top_k), F(temperature), F(top_p), F(min_p), F(top_n_sigma)) +
        CAROUSEL_LAYOUT(Adjustments, F(repetition_penalty), F(seen), F(num_seen), F(deducted), F(num_deducted),
                        F(deductions), F(biased), F(num_biased), F(biases), F(banned), F(num_banned), F(mask));
#undef F
    return lines.c_str();
}

}  // namespace carousel
