// Chooses each row's experts in a mixture (Shazeer et al., 2017; as in Mixtral and Qwen3-MoE), and groups rows by
// expert. A row's experts, their weights and their order depend only on the row, so other rows do not change its bits.
#pragma once

#include <utility>
#include <vector>

#include "matmul.h"

namespace carousel {

struct ExpertsShape {
    int64_t num_experts, per_token, intermediate_size;
    int64_t weights_sum_to_one;  // whether a row's chosen weights are normalised
    // Whether routing weights, and expert outputs multiplied by them, are rounded to the model's dtype.
    int64_t rounds_weights;
};

// The experts of all rows in a step.
//
// A *place* is a pair of a row and one of its experts. An expert's places are adjacent, in the order of rows.
class Routing {
  public:
    struct Rows {  // an expert's places
        int64_t expert, first, count;
    };

    explicit Routing(const ExpertsShape& shape)
        : shape_(shape), padded_((shape.num_experts + PANEL - 1) / PANEL * PANEL) {}

    void grow(int64_t num_rows) {
        logits_.resize(num_rows * padded_);
        experts_.resize(num_rows * shape_.per_token);
        weights_.resize(num_rows * shape_.per_token);
        places_.resize(num_rows * shape_.per_token);
    }

    float* logits(int64_t row) { return logits_.data() + row * padded_; }  // of all experts, padded to whole panels

    // Chooses a row's experts by its logits.
    template <typename T>
    void choose(int64_t row) {
        float* parts = logits(row);
        std::fill(parts + shape_.num_experts, parts + padded_, -INFINITY);
        const float most = *std::max_element(parts, parts + shape_.num_experts);
        Vector sums = {};
        for (int64_t at = 0; at < padded_; at += LANES) {
            const Vector part = exponential(load(parts + at) - most);
            store(part, parts + at);
            sums += part;
        }
        const Scored* chosen = greatest(parts);
        float sum = sum_of(sums);
        if (shape_.weights_sum_to_one) {
            sum = 0.0f;
            for (int64_t choice = 0; choice < shape_.per_token; ++choice) sum += chosen[choice].first;
        }
        for (int64_t choice = 0; choice < shape_.per_token; ++choice) {
            const float weight = chosen[choice].first / sum;
            experts_[row * shape_.per_token + choice] = chosen[choice].second;
            weights_[row * shape_.per_token + choice] =
                shape_.rounds_weights ? round_to(Vector{} + weight, T{})[0] : weight;
        }
    }

    // Sorts all rows' experts into places.
    void group(int64_t num_rows) {
        next_.assign(shape_.num_experts, 0);
        const int64_t num_places = num_rows * shape_.per_token;
        for (int64_t at = 0; at < num_places; ++at) ++next_[experts_[at]];
        rows_.clear();
        int64_t first = 0;
        for (int64_t expert = 0; expert < shape_.num_experts; ++expert) {
            const int64_t count = std::exchange(next_[expert], first);
            if (count) rows_.push_back({expert, first, count});
            first += count;
        }
        for (int64_t at = 0; at < num_places; ++at) places_[at] = next_[experts_[at]]++;
    }

    const std::vector<Rows>& rows() const { return rows_; }  // only experts that have rows

    int64_t place(int64_t row, int64_t choice) const { return places_[row * shape_.per_token + choice]; }
    float weight(int64_t row, int64_t choice) const { return weights_[row * shape_.per_token + choice]; }

  private:
    using Scored = std::pair<float, int64_t>;

    // Returns the experts with the greatest numbers, in order. Makes the same calls as torch's `topk` on a CPU, to
    // choose the same among equal numbers, which are frequent in bfloat16.
    const Scored* greatest(const float* numbers) const {
        thread_local std::vector<Scored> scored;
        scored.resize(shape_.num_experts);
        for (int64_t expert = 0; expert < shape_.num_experts; ++expert) scored[expert] = {numbers[expert], expert};
        const auto is_before = [](const Scored& x, const Scored& y) {
            return (std::isnan(x.first) && !std::isnan(y.first)) || x.first > y.first;
        };
        const auto begin = scored.begin(), last = begin + shape_.per_token - 1;
        if (shape_.per_token * 64 <= shape_.num_experts) {
            std::partial_sort(begin, last + 1, scored.end(), is_before);
        } else {
            std::nth_element(begin, last, scored.end(), is_before);
            std::sort(begin, last, is_before);
        }
        return scored.data();
    }

    const ExpertsShape shape_;
    const int64_t padded_;  // experts
    std::vector<float> logits_;
    std::vector<int64_t> experts_, places_;  // [num_rows][per_token], the expert with the greatest weight first
    std::vector<float> weights_;             // in the order of experts_
    std::vector<int64_t> next_;  // next place of each expert
    std::vector<Rows> rows_;
};

}  // namespace carousel
