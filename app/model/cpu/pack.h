// Packs the weights of linear layers into the panels of matrices, unchanged or quantised to 8 or 4 bits.
#pragma once

#include <limits>
#include <type_traits>

#include "quantised.h"
#include "thread_pool.h"

namespace carousel {

// Writes rows of `num_units` units, one row per output, to [panels][num_units][PANEL] units, padded with zeros.
inline void pack(ThreadPool& threads, const uint32_t* rows, int64_t num_outputs, int64_t num_units, uint32_t* panels) {
    constexpr int64_t WIDTH = 16;  // units of a row that are read at once: a cache line
    threads.run([&] {
        threads.share((num_outputs + PANEL - 1) / PANEL, [&](int64_t panel) {
            const int64_t first = panel * PANEL, height = std::min<int64_t>(PANEL, num_outputs - first);
            for (int64_t unit = 0; unit < num_units; unit += WIDTH) {
                const int64_t width = std::min(WIDTH, num_units - unit);
                uint32_t tile[PANEL][WIDTH] = {};
                for (int64_t row = 0; row < height; ++row)
                    std::memcpy(tile[row], rows + (first + row) * num_units + unit, width * sizeof(uint32_t));
                uint32_t* to = panels + (panel * num_units + unit) * PANEL;
                for (int64_t at = 0; at < width; ++at, to += PANEL)
                    for (int64_t row = 0; row < PANEL; ++row) to[row] = tile[row][at];
            }
        });
    });
}

// The grid of values to which the weights of a group are rounded: `least` plus whole multiples of `scale`. Each lane
// belongs to another output.
struct Grid {
    Vector scale, least;

    // Returns the grid as stored, with both values rounded to bfloat16.
    Grid stored() const { return {round_to(scale, bf16{}), round_to(least, bf16{})}; }

    // Returns the grid with both values moved by some steps between adjacent bfloat16 numbers, upwards if positive.
    Grid moved(int scale_up, int least_up) const {
        const Integers away = least < 0.0f ? Integers{} - least_up : Integers{} + least_up;  // away from zero
        return {(Vector)((Integers)scale + scale_up * 0x10000), (Vector)((Integers)least + away * 0x10000)};
    }

    Words pair() const { return (Words)scale >> 16 | ((Words)least & 0xffff0000u); }
};

// A group's weights of LANES outputs, and for each output the best grid so far, which has the least squared error.
template <int BITS>
class Fit {
  public:
    static constexpr int SIZE = Grouping<BITS>::SIZE;
    static constexpr float MOST = (1 << BITS) - 1;

    explicit Fit(const Vector (&weights)[SIZE]) : weights_(weights), least_(weights[0]), greatest_(weights[0]) {
        for (const Vector& x : weights) {
            least_ = x < least_ ? x : least_;
            greatest_ = x > greatest_ ? x : greatest_;
            mean_ += x * (1.0f / SIZE);
        }
        search(std::integral_constant<int, BITS>{});
    }

    const Grid& best() const { return best_; }

    // Returns the number from 0 to MOST whose value on the best grid is nearest to a weight.
    Words number(int at) const { return (Words)__builtin_convertvector(nearest(at, best_, steps(best_)), Integers); }

  private:
    // Tries the grid from the least weight to the greatest, then grids with ends close by. They round the weights
    // differently, some with considerably less error.
    void search(std::integral_constant<int, 8>) {
        const Vector least = round_to(least_, bf16{});
        const Grid plain = Grid{(greatest_ - least) / MOST, least}.stored();
        try_grid(plain);
        for (int least_up = -1; least_up <= 2; ++least_up)
            for (int scale_up = -1; scale_up <= 2; ++scale_up)
                if (least_up != 0 || scale_up != 0) try_grid(plain.moved(scale_up, least_up));
    }

    // Tries the range of the weights and narrower ones, in the middle and at both sides, each followed by regressions.
    // First tries the range divided into whole numbers of steps, because weights from a file of 4 bits lie on such a
    // grid, even if a group lacks its ends. A grid of fewer than 8 steps is part of a finer one.
    void search(std::integral_constant<int, 4>) {
        const Vector range = greatest_ - least_;
        for (float num_steps = MOST; num_steps >= 8; --num_steps) try_grid(Grid{range / num_steps, least_}.stored());
        try_regressions({range / MOST, least_});
        for (const float share : {0.93f, 0.86f, 0.79f})
            for (const float below : {0.1f, 0.5f, 0.9f})
                try_regressions({range * (share / MOST), least_ + range * ((1.0f - share) * below)});
    }

    // Tries the grid of a regression of the weights on their numbers, and that of a second regression.
    void try_regressions(Grid grid) {
        for (int again = 0; again < 2; ++again) {
            const Vector per_step = steps(grid);
            Vector sum = {}, squares = {}, products = {};
            for (int at = 0; at < SIZE; ++at) {
                const Vector number = nearest(at, grid, per_step);
                sum += number;
                squares += number * number;
                products += number * (weights_[at] - mean_);
            }
            const Vector spread = squares - sum * sum * (1.0f / SIZE);
            grid.scale = round_to(products / (spread > 1.0f ? spread : Vector{} + 1.0f), bf16{});
            grid.least = round_to(mean_ - grid.scale * sum * (1.0f / SIZE), bf16{});
            try_grid(grid);
        }
    }

    void try_grid(const Grid& grid) {
        const Vector per_step = steps(grid);
        Vector error = {};
        for (int at = 0; at < SIZE; ++at) {
            const Vector off = nearest(at, grid, per_step) * grid.scale + grid.least - weights_[at];
            error += off * off;
        }
        const Integers is_better = error < error_;  // false for an error of NaN
        best_.scale = is_better ? grid.scale : best_.scale;
        best_.least = is_better ? grid.least : best_.least;
        error_ = is_better ? error : error_;
    }

    static Vector steps(const Grid& grid) {
        const Vector smallest = Vector{} + std::numeric_limits<float>::min();
        return 1.0f / (grid.scale > smallest ? grid.scale : smallest);
    }

    Vector nearest(int at, const Grid& grid, Vector per_step) const {
        Vector x = (weights_[at] - grid.least) * per_step;
        x = x > 0.0f ? x : Vector{};
        x = x < MOST ? x : Vector{} + MOST;
        return (x + ROUNDER) - ROUNDER;
    }

    const Vector (&weights_)[SIZE];
    Vector least_, greatest_, mean_ = {}, error_ = Vector{} + std::numeric_limits<float>::infinity();
    Grid best_ = {};
};

// Like `rotate`, for [inputs] with another group in each lane.
template <int SIZE>
inline void rotate_lanes(Vector (&group)[SIZE]) {
    for (int distance = 1; distance < SIZE; distance *= 2)
        for (int at = 0; at < SIZE; ++at)
            if ((at & distance) == 0) {
                const Vector left = group[at], right = group[at + distance];
                group[at] = left + right, group[at + distance] = left - right;
            }
}

// Writes a group's units for LANES outputs: scale and least weight, then numbers. weights: [inputs], an output a lane.
template <int BITS>
inline void pack_group(const Vector (&weights)[Grouping<BITS>::SIZE], uint32_t* to) {
    constexpr int WORDS = GROUP_WORDS<BITS>, PER_WORD = PER_UNIT<int8_t>;
    const Fit<BITS> fit(weights);
    const Words pair = fit.best().pair();
    std::memcpy(to, &pair, sizeof(pair));
    for (int word = 0; word < WORDS; ++word) {
        Words numbers = {};
        for (int part = 0; part < 8 / BITS; ++part)
            for (int byte = 0; byte < PER_WORD; ++byte)
                numbers |= fit.number((part * WORDS + word) * PER_WORD + byte) << (byte * 8 + part * BITS);
        std::memcpy(to += PANEL, &numbers, sizeof(numbers));
    }
}

// Packs rows of `num_inputs` weights, one row per output, into the panels of quantised.h.
template <int BITS, typename T>
void pack_quantised(ThreadPool& threads, const T* rows, int64_t num_outputs, int64_t num_inputs, uint32_t* panels) {
    constexpr int64_t SIZE = Grouping<BITS>::SIZE, UNITS = 1 + GROUP_WORDS<BITS>;
    threads.run([&] {
        threads.share((num_outputs + PANEL - 1) / PANEL, [&](int64_t panel) {
            uint32_t* to = panels + panel * PANEL * panel_units<BITS>(num_inputs);
            for (int64_t first = 0; first < num_inputs; first += SIZE, to += UNITS * PANEL) {
                for (int64_t half = 0; half < PANEL; half += LANES) {
                    float tile[SIZE][LANES] = {};
                    const int64_t output = panel * PANEL + half;
                    for (int64_t lane = 0; lane < std::min<int64_t>(LANES, num_outputs - output); ++lane) {
                        const T* from = rows + (output + lane) * num_inputs;
                        for (int64_t at = 0; at < SIZE && first + at < num_inputs; at += LANES) {
                            const Vector x = load_some(from + first + at, num_inputs - first - at);
                            for (int64_t part = 0; part < LANES; ++part) tile[at + part][lane] = x[part];
                        }
                    }
                    Vector group[SIZE];
                    std::memcpy(group, tile, sizeof(group));
                    if constexpr (Grouping<BITS>::IS_ROTATED) {
                        rotate_lanes(group);
                        for (Vector& x : group) x *= 0.125f;  // divides by the square root of the size
                    }
                    pack_group<BITS>(group, to + half);
                }
            }
        });
    });
}

}  // namespace carousel
