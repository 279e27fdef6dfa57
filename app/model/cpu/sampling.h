// Adjusts a row of logits and draws a token from it, as defined in app/model/sampler.py: Gumbel-max over the tokens
// that the filters leave, with noise from a hash of (seed, position, token). The whole vocabulary is never sorted.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "vectors.h"

namespace carousel {

struct Draw {  // fields as in sampler.py: `DRAW_INTEGERS` after the position, then `DRAW_FLOATS`
    int64_t position, seed, top_k;  // top_k 0 for none
    float temperature, top_p, min_p, top_n_sigma;  // top_n_sigma 0 for none
};

typedef uint64_t Longs __attribute__((vector_size(8 * 8)));

// splitmix64 (Steele, Lea & Flood, 2014).
template <typename X>
inline X mix(X x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull;

// The logarithm of a positive number, to about 1 ulp (the polynomial of Cephes' logf).
inline Vector logarithm(Vector x) {
    Integers bits = (Integers)x;
    Vector exponent = __builtin_convertvector((bits >> 23) - 126, Vector);
    Vector m = (Vector)((bits & 0x007fffff) | 0x3f000000);  // in [0.5, 1)
    const auto is_small = m < 0.70710678f;
    exponent = is_small ? exponent - 1.0f : exponent;
    m = is_small ? m + m - 1.0f : m - 1.0f;
    const Vector z = m * m;
    Vector y = m * 7.0376836292e-2f - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m - 1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m - 2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    y = y * m * z + exponent * -2.12194440e-4f - 0.5f * z;
    return m + y + exponent * 0.693359375f;
}

// Returns Gumbel noise for the 16 tokens from `token` on.
inline Vector gumbel(uint64_t key, int64_t token) {
    const Longs lane = {1, 2, 3, 4, 5, 6, 7, 8};
    typedef int32_t Half __attribute__((vector_size(8 * 4)));
    const Longs first = mix(key + (lane + uint64_t(token)) * GOLDEN) >> 40;
    const Longs second = mix(key + (lane + uint64_t(token) + 8) * GOLDEN) >> 40;
    const Half halves[2] = {__builtin_convertvector(first, Half), __builtin_convertvector(second, Half)};
    Integers bits;
    std::memcpy(&bits, halves, sizeof(bits));
    // u = (bits + 0.5) / 2^24 and 1 - u are both exact where they are small. log(u) is computed from the smaller one
    // (log1p as in Goldberg, 1991).
    const Vector unit = Vector{} + 0x1p-24f;
    const Vector u = (__builtin_convertvector(bits, Vector) + 0.5f) * unit;
    const Vector rest = (__builtin_convertvector(0x1000000 - bits, Vector) - 0.5f) * unit;
    const Vector y = 1.0f - rest;
    const Vector near_one = y == 1.0f ? -rest : logarithm(y) * rest / (1.0f - y);
    return -logarithm(-(u < 0.5f ? logarithm(u) : near_one));
}

constexpr float GREATEST_NOISE = 17.4f;  // the greatest value from 24 random bits

// The last token of a prefix of the tokens, sorted by descending score and, among equal scores, by ascending id.
struct Edge {
    float score;
    int64_t token;
};
constexpr Edge NO_EDGE = {-std::numeric_limits<float>::max(), std::numeric_limits<int64_t>::max()};

struct DrawScratch {  // of one thread, reused in later calls
    std::vector<float> scores;   // logit / temperature, padded with -inf
    std::vector<float> weights;  // e^(score - greatest)
    std::vector<std::pair<float, int64_t>> bracket;
};

// Returns the sum over the tokens with a score of at least `least`: of their weights, or of 1 if `weights` is null.
inline float sum_above(const std::vector<float>& scores, const float* weights, float least) {
    Vector sums = {};
    for (size_t at = 0; at < scores.size(); at += LANES) {
        const Vector weight = weights ? load(weights + at) : Vector{} + 1.0f;
        sums += load(&scores[at]) >= least ? weight : Vector{};
    }
    return sum_of(sums);
}

// Finds the shortest prefix with a sum of at least `wanted`: by bisection over the score, with a sort near the edge.
inline Edge find_edge(DrawScratch& scratch, const float* weights, float most, float wanted) {
    const std::vector<float>& scores = scratch.scores;
    float high = std::numeric_limits<float>::infinity(), above = 0.0f, low = most;  // the edge lies in [low, high)
    for (float depth = 0.0f, reached = sum_above(scores, weights, low); reached < wanted;) {
        if (low == NO_EDGE.score) return NO_EDGE;
        high = low, above = reached;
        depth = 2.0f * depth + 0.5f;
        low = depth > 256.0f ? NO_EDGE.score : most - depth;
        reached = sum_above(scores, weights, low);
    }
    for (int round = 0; round < 24 && low < most; ++round) {
        const float middle = 0.5f * (low + std::min(high, most));
        if (middle <= low || middle >= high) break;
        const float reached = sum_above(scores, weights, middle);
        if (reached >= wanted)
            low = middle;
        else
            high = middle, above = reached;
    }
    auto& bracket = scratch.bracket;
    bracket.clear();
    for (size_t at = 0; at < scores.size(); at += LANES) {
        const Vector row = load(&scores[at]);
        if (!any((row >= low) & (row < high))) continue;
        for (size_t token = at; token < at + LANES; ++token)
            if (scores[token] >= low && scores[token] < high) bracket.emplace_back(-scores[token], int64_t(token));
    }
    std::sort(bracket.begin(), bracket.end());
    for (const auto& [negative, token] : bracket) {
        above += weights ? weights[token] : 1.0f;
        if (above >= wanted) return {-negative, token};
    }
    return bracket.empty() ? NO_EDGE : Edge{-bracket.back().first, bracket.back().second};
}

// Returns which of 16 tokens are before the edge or on it.
inline Integers within(Vector scores, int64_t token, const Edge& edge) {
    const Integers lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t left = std::min<int64_t>(edge.token - token, LANES);  // tokens from here on that ties include
    const Integers has_part = lane <= Integers{} + int32_t(std::max<int64_t>(left, -1));
    return (scores > edge.score) | ((scores == edge.score) & has_part);
}

// Sets the scores of tokens that top-k, top-p (Holtzman et al., 2020) or min-p (Nguyen et al., 2024) remove to -inf.
// top-p applies to the tokens that top-k leaves. The likeliest token always remains.
inline void filter(const Draw& draw, float most, DrawScratch& scratch) {
    auto &scores = scratch.scores, &weights = scratch.weights;
    weights.resize(scores.size());
    Vector total = {};
    const auto keep = [&](const Edge& edge, float least_weight) {
        total = Vector{};
        for (size_t at = 0; at < scores.size(); at += LANES) {
            const Vector row = load(&scores[at]);
            const Vector weight = exponential(row - most);
            const Integers stays = within(row, int64_t(at), edge) & (weight >= least_weight);
            store(stays ? row : Vector{} - std::numeric_limits<float>::infinity(), &scores[at]);
            store(stays ? weight : Vector{}, &weights[at]);
            total += stays ? weight : Vector{};
        }
    };
    const bool has_top_k = draw.top_k > 0 && size_t(draw.top_k) < scores.size();
    keep(has_top_k ? find_edge(scratch, nullptr, most, float(draw.top_k)) : NO_EDGE, 0.0f);
    if (draw.top_p >= 1.0f && draw.min_p <= 0.0f) return;
    const float mass = draw.top_p * sum_of(total);
    keep(draw.top_p < 1.0f ? find_edge(scratch, weights.data(), most, mass) : NO_EDGE, draw.min_p);
}

// Returns the least logit that top-n-sigma keeps (Tang et al., 2024): `num_sigmas` standard deviations below the
// greatest. Only finite logits count. Sums are in double, so that their order hardly ever changes the result.
inline float least_near_greatest(const float* logits, int64_t vocab_size, float num_sigmas) {
    typedef double Doubles __attribute__((vector_size(LANES * 8)));
    const Vector infinite = Vector{} + std::numeric_limits<float>::infinity();
    Vector most = -infinite;
    Doubles sums = {}, squares = {}, numbers = {};
    for (int64_t at = 0; at < vocab_size; at += LANES) {
        const int64_t count = std::min<int64_t>(LANES, vocab_size - at);
        Vector row = load_some(logits + at, count);
        for (int64_t lane = count; lane < LANES; ++lane) row[lane] = infinite[lane];
        const Integers counts = (row > -infinite) & (row < infinite);
        most = counts & (row > most) ? row : most;
        const Doubles logit = __builtin_convertvector(counts ? row : Vector{}, Doubles);
        sums += logit, squares += logit * logit, numbers -= __builtin_convertvector(counts, Doubles);
    }
    double sum = 0.0, square = 0.0, number = 0.0, greatest = most[0];
    for (int lane = 0; lane < LANES; ++lane) {
        sum += sums[lane], square += squares[lane], number += numbers[lane];
        greatest = std::max<double>(greatest, most[lane]);
    }
    const double mean = sum / std::max(number, 1.0), variance = square / std::max(number, 1.0) - mean * mean;
    return float(greatest - num_sigmas * std::sqrt(std::max(variance, 0.0)));
}

// Draws one token. logits: [vocab_size].
inline int64_t draw_token(const float* logits, int64_t vocab_size, const Draw& draw) {
    static thread_local DrawScratch scratch;
    std::vector<float>& scores = scratch.scores;
    const int64_t padded = (vocab_size + LANES - 1) / LANES * LANES;
    scores.resize(padded);
    std::fill(scores.begin() + vocab_size, scores.end(), -std::numeric_limits<float>::infinity());
    const bool has_least = draw.top_n_sigma > 0.0f;
    const Vector least = Vector{} + (has_least ? least_near_greatest(logits, vocab_size, draw.top_n_sigma) : 0.0f);
    for (int64_t at = 0; at < vocab_size; at += LANES) {
        const int64_t count = std::min<int64_t>(LANES, vocab_size - at);
        Vector row = load_some(logits + at, count);
        if (has_least) row = row >= least ? row : Vector{} - std::numeric_limits<float>::infinity();
        store_some(row / draw.temperature, &scores[at], count);
    }
    if (draw.top_k > 0 || draw.top_p < 1.0f || draw.min_p > 0.0f)
        filter(draw, scores[first_greatest(scores.data(), padded)], scratch);

    const uint64_t key = mix(mix(uint64_t(draw.seed) + GOLDEN) + uint64_t(draw.position) * GOLDEN);
    int64_t best = 0;
    float best_score = -std::numeric_limits<float>::infinity();
    for (int64_t at = 0; at < padded; at += LANES) {
        const Vector row = load(&scores[at]);
        if (!any(row > best_score - GREATEST_NOISE)) continue;  // no noise can make one of these the greatest
        const Vector noisy = row + gumbel(key, at);
        if (!any(noisy > best_score)) continue;
        for (int lane = 0; lane < LANES; ++lane)
            if (noisy[lane] > best_score) best_score = noisy[lane], best = at + lane;
    }
    return best;
}

// Sets the logits of tokens that are not allowed to -inf. Token t is bit t % 8 of byte t / 8.
inline void mask_row(float* logits, int64_t vocab_size, const uint8_t* allowed) {
    const Integers lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Vector never = Vector{} - std::numeric_limits<float>::infinity();
    for (int64_t at = 0; at < vocab_size; at += LANES) {
        const int64_t count = std::min<int64_t>(LANES, vocab_size - at);
        const int32_t bits = allowed[at / 8] | (count > 8 ? allowed[at / 8 + 1] << 8 : 0);
        if (bits == 0xffff) continue;
        const Integers stays = ((Integers{} + bits) >> lane & 1) != 0;
        store_some(stays ? load_some(logits + at, count) : never, logits + at, count);
    }
}

struct Adjustments {
    float repetition_penalty;
    const int64_t* seen;  // each token is changed once, however often it is listed
    int64_t num_seen;
    const int64_t* deducted;
    int64_t num_deducted;
    const float* deductions;
    const int64_t* biased;
    int64_t num_biased;
    const float* biases;
    const int64_t* banned;
    int64_t num_banned;
    int64_t mask;  // index of the mask, or -1 for none
};

// Performs the operations of `sampler.adjust` in the same order. logits: [vocab_size].
inline void adjust_row(float* logits, int64_t vocab_size, const Adjustments& row, const uint8_t* mask) {
    static thread_local std::vector<float> changed;
    changed.resize(row.num_seen);
    for (int64_t at = 0; at < row.num_seen; ++at) {
        const float before = logits[row.seen[at]];
        changed[at] = before > 0.0f ? before / row.repetition_penalty : before * row.repetition_penalty;
    }
    for (int64_t at = 0; at < row.num_seen; ++at) logits[row.seen[at]] = changed[at];
    for (int64_t at = 0; at < row.num_deducted; ++at) logits[row.deducted[at]] += row.deductions[at];
    for (int64_t at = 0; at < row.num_biased; ++at) logits[row.biased[at]] += row.biases[at];
    for (int64_t at = 0; at < row.num_banned; ++at) logits[row.banned[at]] = -std::numeric_limits<float>::infinity();
    if (mask) mask_row(logits, vocab_size, mask);
}

}  // namespace carousel
