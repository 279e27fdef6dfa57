// Computes the log-softmax of a row of logits for one token and the likeliest tokens, without storing all values.
#pragma once

#include <limits>

#include "vectors.h"

namespace carousel {

struct RowLogprobs {
    float* normaliser;  // the number that is subtracted from logits
    float* logprob;
    int64_t* rank;  // 1 if no token is likelier
    int64_t* top_tokens;  // [num_top], the likeliest first, and equal ones by ascending id
    float* top_logprobs;  // [num_top]
};

// Returns the logits from `at` on. Lanes past the end are -infinity.
inline Vector logits_at(const float* logits, int64_t vocab_size, int64_t at) {
    if (at + LANES <= vocab_size) return load(logits + at);
    float numbers[LANES];
    std::fill(numbers, numbers + LANES, -std::numeric_limits<float>::infinity());
    std::memcpy(numbers, logits + at, (vocab_size - at) * sizeof(float));
    return load(numbers);
}

// Inserts a logit into the sorted greatest ones, dropping the last.
inline void insert_logit(float logit, int64_t token, int64_t num_top, const RowLogprobs& row) {
    int64_t place = num_top - 1;
    for (; place > 0 && row.top_logprobs[place - 1] < logit; --place) {
        row.top_logprobs[place] = row.top_logprobs[place - 1];
        row.top_tokens[place] = row.top_tokens[place - 1];
    }
    row.top_logprobs[place] = logit;
    row.top_tokens[place] = token;
}

inline void find_greatest(const float* logits, int64_t vocab_size, int64_t num_top, const RowLogprobs& row) {
    std::fill(row.top_logprobs, row.top_logprobs + num_top, -std::numeric_limits<float>::infinity());
    std::fill(row.top_tokens, row.top_tokens + num_top, 0);
    for (int64_t at = 0; at < vocab_size; at += LANES) {
        const Vector numbers = logits_at(logits, vocab_size, at);
        if (!any(numbers > row.top_logprobs[num_top - 1])) continue;
        for (int lane = 0; lane < LANES; ++lane)
            if (numbers[lane] > row.top_logprobs[num_top - 1]) insert_logit(numbers[lane], at + lane, num_top, row);
    }
}

// logits: [vocab_size]. Every result is a single subtraction from a logit, so equal logits yield equal results.
inline void row_logprobs(const float* logits, int64_t vocab_size, int64_t token, int64_t num_top,
                         const RowLogprobs& row) {
    const float greatest = logits[first_greatest(logits, vocab_size)], own = logits[token];
    Vector total = {};
    Integers num_greater = {};
    for (int64_t at = 0; at < vocab_size; at += LANES) {
        const Vector numbers = logits_at(logits, vocab_size, at);
        total += exponential(numbers - greatest);
        num_greater -= numbers > own;  // a true comparison is -1
    }
    const float normaliser = greatest + std::log(sum_of(total));
    *row.normaliser = normaliser;
    *row.logprob = own - normaliser;
    *row.rank = 1;
    for (int lane = 0; lane < LANES; ++lane) *row.rank += num_greater[lane];
    if (num_top == 0) return;
    find_greatest(logits, vocab_size, num_top, row);
    for (int64_t place = 0; place < num_top; ++place) row.top_logprobs[place] -= normaliser;
}

}  // namespace carousel
