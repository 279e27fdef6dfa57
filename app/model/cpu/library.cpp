// The functions that Python calls through ctypes, which releases the GIL. They accept plain pointers instead of torch's
// types, so that this file compiles in seconds. typed.cpp contains the functions that exist once per number type.

#include <algorithm>

#include "logprobs.h"
#include "pack.h"
#include "sampling.h"
#include "thread_pool.h"

using namespace carousel;

namespace {

constexpr int64_t WORTH_SHARING = 1 << 17;  // numbers; with fewer, one thread is done before the others wake

// Returns a call's row with index `at`. Without a list, a call is for all rows in order.
int64_t row_of(const int64_t* rows, int64_t at) { return rows ? rows[at] : at; }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void* carousel_thread_pool_new(int32_t size) { return new ThreadPool(size); }
void carousel_thread_pool_delete(void* threads) { delete static_cast<ThreadPool*>(threads); }

// Writes to every page of some memory, so that the system allocates the pages now.
void carousel_touch(void* threads, char* memory, int64_t num_bytes) {
    constexpr int64_t PIECE = 1 << 23, PAGE = 1 << 12;
    ThreadPool& members = *static_cast<ThreadPool*>(threads);
    members.run([&] {
        members.share((num_bytes + PIECE - 1) / PIECE, [&](int64_t piece) {
            const int64_t end = std::min(num_bytes, (piece + 1) * PIECE);
            for (int64_t at = piece * PIECE; at < end; at += PAGE) *static_cast<volatile char*>(memory + at) = 0;
            *static_cast<volatile char*>(memory + end - 1) = 0;
        });
    });
}

// Packs weights without quantising them.
void carousel_pack(void* threads, const uint32_t* rows, int64_t num_outputs, int64_t num_units, uint32_t* panels) {
    pack(*static_cast<ThreadPool*>(threads), rows, num_outputs, num_units, panels);
}

// Returns 0 if the matrix unit is used, -1 if this build has no code for it, or the kernel's error number.
int32_t carousel_amx_refusal() { return amx::refusal(); }

// Return whether this build's loops are faster than transformers' code.
int32_t carousel_is_fast_in_f32() {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)) || defined(__ARM_NEON)
    return 1;
#else
    return 0;
#endif
}

int32_t carousel_is_fast_in_bf16() {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
    return 1;
#else
    return 0;  // on Arm, torch's products use bfloat16 instructions
#endif
}

// Samples a token for each of the given rows of logits [..][vocab_size].
void carousel_draw(void* threads, const float* logits, int64_t vocab_size, const int64_t* rows, const Draw* draws,
                   int64_t num_draws, int64_t* tokens) {
    ThreadPool& members = *static_cast<ThreadPool*>(threads);
    members.run([&] {
        members.share(num_draws, [&](int64_t at) {
            tokens[at] = draw_token(logits + row_of(rows, at) * vocab_size, vocab_size, draws[at]);
        });
    });
}

// Computes the log-probabilities of a token and the likeliest tokens, for each given row of logits [..][vocab_size].
void carousel_logprobs(void* threads, const float* logits, int64_t vocab_size, const int64_t* rows, const int64_t* tokens,
                       int64_t num_rows, int64_t num_top, float* normalisers, float* logprobs, int64_t* ranks,
                       int64_t* top_tokens, float* top_logprobs) {
    const auto compute = [&](int64_t at) {
        row_logprobs(logits + row_of(rows, at) * vocab_size, vocab_size, tokens[at], num_top,
                     {normalisers + at, logprobs + at, ranks + at, top_tokens + at * num_top, top_logprobs + at * num_top});
    };
    if (num_rows * vocab_size < WORTH_SHARING) {
        for (int64_t at = 0; at < num_rows; ++at) compute(at);
        return;
    }
    ThreadPool& members = *static_cast<ThreadPool*>(threads);
    members.run([&] { members.share(num_rows, compute); });
}

// Writes adjusted copies, [num_rows][vocab_size], of the given rows of logits. masks: `num_bytes` bytes each.
void carousel_adjust(void* threads, const float* logits, int64_t vocab_size, const int64_t* rows,
                     const Adjustments* adjustments, int64_t num_rows, const uint8_t* masks, int64_t num_bytes,
                     float* adjusted) {
    ThreadPool& members = *static_cast<ThreadPool*>(threads);
    members.run([&] {
        members.share(num_rows, [&](int64_t at) {
            float* const row = adjusted + at * vocab_size;
            std::memcpy(row, logits + row_of(rows, at) * vocab_size, vocab_size * sizeof(float));
            const int64_t mask = adjustments[at].mask;
            adjust_row(row, vocab_size, adjustments[at], mask < 0 ? nullptr : masks + mask * num_bytes);
        });
    });
}

}
#pragma GCC visibility pop
