// The functions that exist once per number type of models. This file is compiled separately for each type. TYPE is the
// type's name, which ends the functions' names.

#include "attention.h"
#include "decoder.h"
#include "layouts.h"
#include "pack.h"
#include "recurrence.h"
#include "thread_pool.h"

using namespace carousel;

#define JOIN(NAME, SUFFIX) carousel_##NAME##_##SUFFIX
#define JOIN_VALUES(NAME, SUFFIX) JOIN(NAME, SUFFIX)
#define OF_TYPE(NAME) JOIN_VALUES(NAME, TYPE)

namespace {

using T = TYPE;

// Stores the new tokens' keys and values, then attends.
void attention_step(ThreadPool& threads, const AttentionShape& shape, const Strides& strides, const T* query, const T* key,
                    const T* value, const int64_t* slots, int64_t num_tokens, const Pages<T>& pages,
                    const Segment* segments, int64_t num_segments, const int32_t* tables, T* output) {
    const Heads<const T> queries{query, strides.query_token, strides.query_head};
    const Heads<const T> keys{key, strides.key_token, strides.key_head};
    const Heads<const T> values{value, strides.value_token, strides.value_head};
    const Heads<T> outputs{output, shape.num_heads * shape.value_dim, shape.value_dim};
    Groups groups;
    groups.find(segments, num_segments, tables, shape, rows_together<T>(shape).most, threads.size());
    threads.run([&] {
        threads.share(num_tokens, [&](int64_t token) {
            for (int64_t head = 0; head < shape.num_kv_heads; ++head)
                pages.write(slots[token], head, keys.at(token, head), values.at(token, head));
        });
        attend_in(threads, shape, pages, groups, tables, queries, outputs);
    });
}

HeadRows<T> head_rows(const Strides& strides, const void* query, const void* key, const void* value) {
    return {{static_cast<const T*>(query), strides.query_token, strides.query_head},
            {static_cast<const T*>(key), strides.key_token, strides.key_head},
            {static_cast<const T*>(value), strides.value_token, strides.value_head}};
}

// own: a `Mamba1` or a `Mamba2`.
template <typename Mamba>
void scan(void* threads, const RecurrenceShape& shape, const HeadRows<T>& rows, const Mamba& own, float* states,
          const Pieces& pieces, void* outputs) {
    ThreadPool& members = *static_cast<ThreadPool*>(threads);
    members.run([&] { scan_in(members, shape, rows, own, states, pieces, static_cast<T*>(outputs)); });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

const char* OF_TYPE(layouts)() { return layouts(); }

void OF_TYPE(attention_step)(void* threads, const AttentionShape* shape, const Strides* strides,
                             const void* query, const void* key, const void* value, const int64_t* slots,
                             int64_t num_tokens, void* keys, void* values, float* scales,
                             const Segment* segments, int64_t num_segments, const int32_t* tables,
                             void* output) {
    attention_step(*static_cast<ThreadPool*>(threads), *shape, *strides, static_cast<const T*>(query),
                   static_cast<const T*>(key), static_cast<const T*>(value), slots, num_tokens,
                   Pages<T>(*shape, keys, values, scales), segments, num_segments, tables, static_cast<T*>(output));
}

void OF_TYPE(short_convolution)(void* threads, const ConvolutionShape* shape, const void* inputs, const void* weight,
                                const void* bias, void* states, const Piece* pieces, int64_t num_pieces, void* outputs) {
    ThreadPool& members = *static_cast<ThreadPool*>(threads);
    members.run([&] {
        convolve_in(members, *shape, static_cast<const T*>(inputs), static_cast<const T*>(weight),
                    static_cast<const T*>(bias), static_cast<T*>(states), {pieces, num_pieces}, static_cast<T*>(outputs));
    });
}

void OF_TYPE(gated_delta_rule)(void* threads, const RecurrenceShape* shape, const Strides* strides, const void* query,
                               const void* key, const void* value, const float* decay, const float* beta, float* states,
                               const Piece* pieces, int64_t num_pieces, void* outputs) {
    ThreadPool& members = *static_cast<ThreadPool*>(threads);
    members.run([&] {
        delta_rule_in<T>(members, *shape, head_rows(*strides, query, key, value), decay, beta, states,
                         {pieces, num_pieces}, static_cast<T*>(outputs));
    });
}

void OF_TYPE(mamba1)(void* threads, const RecurrenceShape* shape, const Strides* strides, const void* state_to_outputs,
                     const void* inputs_to_state, const void* inputs, const float* time_steps, const float* decay,
                     const float* skip, float* states, const Piece* pieces, int64_t num_pieces, void* outputs) {
    scan(threads, *shape, head_rows(*strides, state_to_outputs, inputs_to_state, inputs), Mamba1{time_steps, decay, skip},
         states, {pieces, num_pieces}, outputs);
}

void OF_TYPE(mamba2)(void* threads, const RecurrenceShape* shape, const Strides* strides, const void* state_to_outputs,
                     const void* inputs_to_state, const void* inputs, const float* time_steps, const float* decay,
                     const float* skip, float* states, const Piece* pieces, int64_t num_pieces, void* outputs) {
    scan(threads, *shape, head_rows(*strides, state_to_outputs, inputs_to_state, inputs), Mamba2{time_steps, decay, skip},
         states, {pieces, num_pieces}, outputs);
}

void* OF_TYPE(decoder_new)(const DecoderShape* shape, const LayerWeights* layers, const void* embedding,
                           const float* final_norm, const uint32_t* head, void* threads) {
    return new Decoder<T>(*shape, layers, embedding, final_norm, head, *static_cast<ThreadPool*>(threads));
}

void OF_TYPE(decoder_run)(void* decoder, const DecoderStep* step) {
    static_cast<Decoder<T>*>(decoder)->run(*step);
}

void OF_TYPE(decoder_delete)(void* decoder) { delete static_cast<Decoder<T>*>(decoder); }

void OF_TYPE(pack_in_8_bits)(void* threads, const void* rows, int64_t num_outputs, int64_t num_inputs,
                             uint32_t* panels) {
    pack_quantised<8>(*static_cast<ThreadPool*>(threads), static_cast<const T*>(rows), num_outputs, num_inputs, panels);
}

void OF_TYPE(pack_in_4_bits)(void* threads, const void* rows, int64_t num_outputs, int64_t num_inputs,
                             uint32_t* panels) {
    pack_quantised<4>(*static_cast<ThreadPool*>(threads), static_cast<const T*>(rows), num_outputs, num_inputs, panels);
}

}
#pragma GCC visibility pop
