// Writes the weights of linear layers into panels of packed matrices, as they are or in 8 or 4 bits.
#pragma once

#include <limits>

#include "quantised.h"
#include "team.h"

namespace carousel {

// Rows of `num_units` units, one for each output, into [panels][num_units][PANEL] units, padded with zeros.
inline void pack(Team& team, const uint32_t* rows, int64_t num_outputs, int64_t num_units, uint32_t* panels) {
    constexpr int64_t WIDTH = 16;  // units of a row that are read together: a cache line
    team.run([&] {
        team.share((num_outputs + PANEL - 1) / PANEL, [&](int64_t panel) {
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

// The values that a group's weights are rounded to: `least` and whole multiples of `scale` above it, both in bfloat16's
// precision.
struct Grid {
    float scale, least;

    uint32_t pair() const {
        uint32_t bits[2];
        std::memcpy(bits, this, sizeof(bits));
        return bits[0] >> 16 | (bits[1] & 0xffff0000u);
    }
};

inline float to_bf16(float x) { return round_to(Vector{} + x, bf16{})[0]; }

template <int PARTS, typename Merge>
inline float merged(const Vector (&group)[PARTS], Merge merge) {
    Vector all = group[0];
    for (int part = 1; part < PARTS; ++part) all = merge(all, group[part]);
    all = merge(all, swapped<8>(all)), all = merge(all, swapped<4>(all));
    all = merge(all, swapped<2>(all)), all = merge(all, swapped<1>(all));
    return all[0];
}
template <int PARTS>
inline float least_of(const Vector (&group)[PARTS]) {
    return merged(group, [](Vector a, Vector b) { return a < b ? a : b; });
}
template <int PARTS>
inline float greatest_of(const Vector (&group)[PARTS]) {
    return merged(group, [](Vector a, Vector b) { return a > b ? a : b; });
}
template <int PARTS>
inline float total_of(const Vector (&group)[PARTS]) {
    return merged(group, [](Vector a, Vector b) { return a + b; });
}

// The numbers from 0 to `most` whose values on the grid are nearest, as floats.
template <int PARTS>
inline void number(const Vector (&group)[PARTS], Grid grid, float most, Vector (&numbers)[PARTS]) {
    const float step = std::max(grid.scale, std::numeric_limits<float>::min());
    for (int part = 0; part < PARTS; ++part) {
        Vector x = (group[part] - grid.least) / step;
        x = x > 0.0f ? x : Vector{};
        x = x < most ? x : Vector{} + most;
        numbers[part] = (x + ROUNDER) - ROUNDER;
    }
}

// From the least weight to the greatest.
inline Grid on_grid(const Vector (&group)[4], Vector (&numbers)[4]) {
    const float least = to_bf16(least_of(group));
    const Grid grid{to_bf16((greatest_of(group) - least) / 255.0f), least};
    number(group, grid, 255.0f, numbers);
    return grid;
}

// Of some ranges, somewhat narrower than that of the weights, the one with the least squared error, each after a
// regression of the weights on their numbers.
inline Grid on_grid(const Vector (&group)[2], Vector (&numbers)[2]) {
    constexpr float SIZE = 2 * LANES;
    const float least = least_of(group), greatest = greatest_of(group), mean = total_of(group) / SIZE;
    float least_error = std::numeric_limits<float>::infinity();
    Grid best{};
    for (const float share : {1.0f, 0.93f, 0.86f}) {
        const float margin = (1.0f - share) / 2.0f * (greatest - least);
        Vector tried[2], parts[2], squares[2];
        number(group, {(greatest - least - 2.0f * margin) / 15.0f, least + margin}, 15.0f, tried);
        const float mean_number = total_of(tried) / SIZE;
        for (int part = 0; part < 2; ++part) {
            const Vector steps = tried[part] - mean_number;
            parts[part] = steps * group[part];
            squares[part] = steps * steps;
        }
        const float scale = to_bf16(total_of(parts) / std::max(total_of(squares), 1e-9f));
        const Grid grid{scale, to_bf16(mean - scale * mean_number)};
        for (int part = 0; part < 2; ++part) {
            const Vector error = tried[part] * grid.scale + grid.least - group[part];
            squares[part] = error * error;
        }
        const float error = total_of(squares);
        if (error >= least_error) continue;
        least_error = error, best = grid;
        numbers[0] = tried[0], numbers[1] = tried[1];
    }
    return best;
}

// A group's words, below its pair: [1 + GROUP_WORDS][PANEL].
template <int BITS, int PARTS>
inline void pack_group(const Vector (&group)[PARTS], uint32_t* to) {
    Vector numbers[PARTS];
    *to = on_grid(group, numbers).pair();
    UnsignedBytes bytes[PARTS * BITS / 8];
    if constexpr (BITS == 8) {
        for (int part = 0; part < PARTS; ++part) bytes[part] = __builtin_convertvector(numbers[part], UnsignedBytes);
    } else {
        bytes[0] = __builtin_convertvector(numbers[0] + numbers[1] * 16.0f, UnsignedBytes);
    }
    uint32_t words[GROUP_WORDS<BITS>];
    static_assert(sizeof(words) == sizeof(bytes));
    std::memcpy(words, bytes, sizeof(words));
    for (const uint32_t word : words) *(to += PANEL) = word;
}

// Rows of `num_inputs`, one for each output, into the panels of quantised.h.
template <int BITS, typename T>
void pack_quantised(Team& team, const T* rows, int64_t num_outputs, int64_t num_inputs, uint32_t* panels) {
    constexpr int64_t SIZE = Grouping<BITS>::SIZE, PARTS = SIZE / LANES;
    team.run([&] {
        team.share((num_outputs + PANEL - 1) / PANEL, [&](int64_t panel) {
            const int64_t height = std::min<int64_t>(PANEL, num_outputs - panel * PANEL);
            uint32_t* to = panels + panel * PANEL * panel_units<BITS>(num_inputs);
            for (int64_t first = 0; first < num_inputs; first += SIZE) {
                std::memset(to, 0, (1 + GROUP_WORDS<BITS>) * PANEL * sizeof(uint32_t));
                for (int64_t row = 0; row < height; ++row) {
                    const T* from = rows + (panel * PANEL + row) * num_inputs;
                    Vector group[PARTS];
                    for (int64_t part = 0; part < PARTS; ++part) {
                        const int64_t at = first + part * LANES;
                        group[part] = at < num_inputs ? load_some(from + at, num_inputs - at) : Vector{};
                    }
                    if constexpr (Grouping<BITS>::IS_ROTATED) {
                        rotate(group);
                        for (Vector& part : group) part *= 0.125f;  // by the root of the size
                    }
                    pack_group<BITS>(group, to + row);
                }
                to += (1 + GROUP_WORDS<BITS>) * PANEL;
            }
        });
    });
}

}  // namespace carousel
