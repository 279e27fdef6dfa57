// Rows times a packed weight matrix.
//
// Each output is one sum over the inputs in their order, whatever else is computed beside it, so a row's bits do not
// depend on which rows share the step (batch invariance).
//
// Weights of int8 have a scale for each GROUP of inputs of a column. The inputs of a row are rounded to 16 bits by a scale
// of that row, as two planes of 8 bits: with one plane, the few great numbers in a row leave too little for the others.
#pragma once

#include "team.h"
#include "vectors.h"

namespace carousel {

constexpr int PANEL = 2 * LANES;     // columns computed together
constexpr int TILE_ROWS = 12;        // rows computed together: 2 × 12 sums stay in registers
constexpr int64_t CHUNK_ROWS = 192;  // the inputs of so many rows stay in the L2 cache while the panels are read
constexpr int64_t AHEAD = 128;       // units of the weights fetched ahead of their use; reads past the end do no harm

// [num_columns / PANEL][num_units][PANEL] units; the last panel is padded with zeros.
struct Matrix {
    const uint32_t* panels;
    int64_t num_inputs;
    int64_t num_columns;  // outputs
};

constexpr int64_t GROUP = 64;  // inputs that share a scale, in matrices of int8
constexpr int64_t GROUP_UNITS = GROUP / PER_UNIT<int8_t>;
constexpr int INT8_TILE_ROWS = 6;  // 4 × 6 sums stay in registers within a group
constexpr float STEPS = 32512.0f;  // 127 × 256: the greatest input of a row

// Of int8: [num_columns / PANEL][rows of PANEL units]. Before the units of each two groups is a row with their scales in
// bfloat16, those of the first group in the lower halves. The weights are shifted by 128, as the CPU's instruction wants
// one side unsigned.
inline int64_t num_groups(int64_t num_inputs) { return (num_inputs + GROUP - 1) / GROUP; }

// Inputs of a matrix of int8.
struct QuantisedRows {
    int8_t* planes;  // [num_rows][2][num_inputs]: a number is 256 × the first and the second
    int32_t* sums;   // [num_rows][num_groups], of the numbers
    float* scales;   // [num_rows]
};

// Rounds a row. The scale of a row with a NaN or an infinity is one too, so that its products show it. `size` is a
// multiple of LANES.
template <typename T>
inline void quantise(const T* from, int64_t size, const QuantisedRows& rows, int64_t row) {
    Integers greatest = {};
    for (int64_t at = 0; at < size; at += LANES) {
        const Integers magnitude = (Integers)load(from + at) & 0x7fffffff;  // NaNs are the greatest of all
        greatest = magnitude > greatest ? magnitude : greatest;
    }
    int32_t most = 0;
    for (int lane = 0; lane < LANES; ++lane) most = std::max(most, greatest[lane]);
    float magnitude;
    std::memcpy(&magnitude, &most, sizeof(magnitude));
    const float per_step = magnitude > 1e-30f ? STEPS / magnitude : 0.0f;
    const Vector shift = Vector{} + 12582912.0f;  // 1.5 × 2^23: adding it rounds, and leaves the number in the low bits
    int8_t* high = rows.planes + 2 * row * size;
    int8_t* low = high + size;
    int32_t* sums = rows.sums + row * num_groups(size);
    std::fill(sums, sums + num_groups(size), 0);
    for (int64_t at = 0; at < size; at += LANES) {
        const Integers numbers = ((Integers)(load(from + at) * per_step + shift) << 10) >> 10;
        const Bytes upper = __builtin_convertvector((numbers + 128) >> 8, Bytes);
        const Bytes lower = __builtin_convertvector(numbers, Bytes);
        std::memcpy(high + at, &upper, sizeof(upper));
        std::memcpy(low + at, &lower, sizeof(lower));
        for (int lane = 0; lane < LANES; ++lane) sums[at / GROUP] += numbers[lane];
    }
    rows.scales[row] = magnitude / STEPS;
}

template <typename T, int ROWS, typename Finish>
inline void multiply_tile(const uint32_t* inputs, int64_t num_units, const uint32_t* panel, Finish&& finish) {
    Vector sums[ROWS][2] = {};
    for (int64_t unit = 0; unit < num_units; ++unit) {
        __builtin_prefetch(panel + (unit + AHEAD) * PANEL);
        __builtin_prefetch(panel + (unit + AHEAD) * PANEL + LANES);
        const Words left = load_units(panel + unit * PANEL), right = load_units(panel + unit * PANEL + LANES);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
            const Words input = broadcast(inputs[row * num_units + unit]);
            sums[row][0] = multiply_add<T>(sums[row][0], left, input);
            sums[row][1] = multiply_add<T>(sums[row][1], right, input);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) finish(row, sums[row][0], sums[row][1]);
}

template <typename T, typename Finish>
inline void multiply_rows(int rows, const uint32_t* inputs, int64_t num_units, const uint32_t* panel, Finish&& finish) {
    switch (rows) {
#define CASE(ROWS) \
    case ROWS:     \
        return multiply_tile<T, ROWS>(inputs, num_units, panel, finish);
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
}

// Configures tiles for products: 0 to 3 hold sums, 4 and 5 inputs, 6 and 7 weights.
inline void configure_products(int rows, int units = amx::UNITS) {
    const int upper = std::min(rows, amx::ROWS), lower = rows - upper;
    amx::Shapes shapes;
    for (const int tile : {0, 1}) shapes.set(tile, upper);
    for (const int tile : {2, 3}) shapes.set(tile, lower);
    shapes.set(4, upper, units);
    shapes.set(5, lower, units);
    for (const int tile : {6, 7}) shapes.set(tile, units);
    amx::configure(shapes);
}

// As `multiply_tile` for one or two BLOCKS of amx::ROWS rows. sums: [rows][PANEL]. Nothing is fetched ahead: in tiles that
// made products slower.
template <typename T, int BLOCKS, typename Sum>
inline void sum_in_amx(const uint32_t* inputs, int64_t stride, int64_t num_units, const uint32_t* panel, Sum* sums) {
    amx::zero<0>();
    amx::zero<1>();
    if constexpr (BLOCKS == 2) amx::zero<2>(), amx::zero<3>();
    for (int64_t unit = 0; unit < num_units; unit += amx::UNITS) {
        amx::load<6>(panel + unit * PANEL, PANEL);
        amx::load<7>(panel + unit * PANEL + LANES, PANEL);
        amx::load<4>(inputs + unit, stride);
        amx::dot<T, 0, 4, 6>();
        amx::dot<T, 1, 4, 7>();
        if constexpr (BLOCKS == 2) {
            amx::load<5>(inputs + amx::ROWS * stride + unit, stride);
            amx::dot<T, 2, 5, 6>();
            amx::dot<T, 3, 5, 7>();
        }
    }
    amx::store<0>(sums, PANEL);
    amx::store<1>(sums + LANES, PANEL);
    if constexpr (BLOCKS == 2) {
        amx::store<2>(sums + amx::ROWS * PANEL, PANEL);
        amx::store<3>(sums + amx::ROWS * PANEL + LANES, PANEL);
    }
}

template <typename T, typename Sum>
inline void sum_in_amx(int rows, const uint32_t* inputs, int64_t stride, int64_t num_units, const uint32_t* panel,
                       Sum* sums) {
    if (rows > amx::ROWS)
        sum_in_amx<T, 2>(inputs, stride, num_units, panel, sums);
    else
        sum_in_amx<T, 1>(inputs, stride, num_units, panel, sums);
}

template <typename Finish>
void multiply_in_amx(int rows, const uint32_t* inputs, int64_t num_units, const uint32_t* panel, Finish&& finish) {
    alignas(64) float sums[2 * amx::ROWS * PANEL];
    configure_products(rows);
    sum_in_amx<bf16>(rows, inputs, num_units, num_units, panel, sums);
    for (int row = 0; row < rows; ++row) finish(row, load(sums + row * PANEL), load(sums + row * PANEL + LANES));
}

// The same with weights of int8. sums: [ROWS][num_groups]. Sums of whole numbers are exact.
template <int ROWS, typename Finish>
inline void multiply_int8_tile(const uint32_t* inputs, const int32_t* sums, int64_t num_units, const uint32_t* panel,
                               int64_t ahead, Finish&& finish) {
    const int64_t num_groups = (num_units + GROUP_UNITS - 1) / GROUP_UNITS;
    const uint32_t* both = panel;  // scales of two groups
    Vector totals[ROWS][2] = {};
    for (int64_t group = 0; group < num_groups; ++group) {
        if (group % 2 == 0) both = panel, panel += PANEL;
        const auto scale = [&](Words units) { return (Vector)(group % 2 == 0 ? units << 16 : units & 0xffff0000u); };
        const Vector scales[2] = {scale(load_units(both)), scale(load_units(both + LANES))};
        Integers high[ROWS][2] = {}, low[ROWS][2] = {};
        const int64_t end = std::min(num_units, (group + 1) * GROUP_UNITS);
        for (int64_t unit = group * GROUP_UNITS; unit < end; ++unit, panel += PANEL) {
            __builtin_prefetch(panel + ahead);
            __builtin_prefetch(panel + ahead + LANES);
            const Words left = load_units(panel), right = load_units(panel + LANES);
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; ++row) {
                const Words upper = broadcast(inputs[2 * row * num_units + unit]);
                const Words lower = broadcast(inputs[(2 * row + 1) * num_units + unit]);
                high[row][0] = multiply_add_bytes(high[row][0], left, upper);
                high[row][1] = multiply_add_bytes(high[row][1], right, upper);
                low[row][0] = multiply_add_bytes(low[row][0], left, lower);
                low[row][1] = multiply_add_bytes(low[row][1], right, lower);
            }
        }
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
            const int32_t shifted = 128 * sums[row * num_groups + group];  // by the shift of the weights
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const Integers whole = (high[row][half] << 8) + low[row][half] - shifted;
                totals[row][half] += __builtin_convertvector(whole, Vector) * scales[half];
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) finish(row, totals[row][0], totals[row][1]);
}

// Calls tile(rows, first, column, panel) for every panel, which begins with `column`, and all rows in tiles of at most
// `max_rows`, which have whole blocks of rows as far as there are. panel_units: of PANEL columns.
template <typename Sharing, typename Tile>
void share_tiles(Sharing& team, int64_t num_rows, int max_rows, int block, const Matrix& matrix, int64_t panel_units,
                 Tile&& tile) {
    const int64_t num_panels = (matrix.num_columns + PANEL - 1) / PANEL;
    const int64_t num_chunks = (num_rows + CHUNK_ROWS - 1) / CHUNK_ROWS, num_blocks = (num_rows + block - 1) / block;
    team.share(num_chunks * num_panels, [&](int64_t task) {
        const int64_t column = task % num_panels * PANEL;
        const uint32_t* panel = matrix.panels + column * panel_units;
        const int64_t chunk = task / num_panels;
        const int64_t end = std::min(num_rows, num_blocks * (chunk + 1) / num_chunks * block);
        int64_t first = num_blocks * chunk / num_chunks * block;
        for (int64_t num_tiles = (end - first + max_rows - 1) / max_rows; num_tiles > 0; --num_tiles) {
            const int64_t even = (end - first + num_tiles - 1) / num_tiles;  // tiles of much the same size
            const int rows = int(std::min(end - first, (even + block - 1) / block * block));
            tile(rows, first, column, panel);
            first += rows;
        }
    });
}

// Calls finish(row, column, left, right) for every row and every PANEL of columns with the sums of columns
// [column, column + LANES) and of the LANES behind them.  inputs: [num_rows][num_inputs].
//
// `team` is a Team, or a LoopPart of the columns.
template <typename T, typename Sharing, typename Finish>
void multiply(Sharing& team, const T* inputs, int64_t num_rows, const Matrix& matrix, Finish&& finish) {
    const uint32_t* units = reinterpret_cast<const uint32_t*>(inputs);
    const int64_t num_units = matrix.num_inputs / PER_UNIT<T>;
    const auto share = [&](int max_rows, int block, auto&& multiply_tiles) {
        share_tiles(team, num_rows, max_rows, block, matrix, num_units,
                    [&](int rows, int64_t first, int64_t column, const uint32_t* panel) {
                        const auto finish_row = [&](int row, Vector left, Vector right) {
                            finish(first + row, column, left, right);
                        };
                        multiply_tiles(rows, units + first * num_units, num_units, panel, finish_row);
                    });
    };
    if (amx::fits<T>(matrix.num_inputs))
        share(2 * amx::ROWS, amx::ROWS, [](auto&&... given) { multiply_in_amx(given...); });
    else
        share(TILE_ROWS, 1, [](auto&&... given) { multiply_rows<T>(given...); });
}

template <typename Sharing, typename Finish>
void multiply(Sharing& team, const QuantisedRows& inputs, int64_t num_rows, const Matrix& matrix, Finish&& finish) {
    const uint32_t* units = reinterpret_cast<const uint32_t*>(inputs.planes);
    const int64_t num_units = matrix.num_inputs / PER_UNIT<int8_t>, groups = num_groups(matrix.num_inputs);
    share_tiles(team, num_rows, INT8_TILE_ROWS, 1, matrix, (groups + 1) / 2 + num_units,
                [&](int rows, int64_t first, int64_t column, const uint32_t* panel) {
                    const auto scaled = [&](int row, Vector left, Vector right) {
                        const float scale = inputs.scales[first + row];
                        finish(first + row, column, left * scale, right * scale);
                    };
                    const uint32_t* from = units + 2 * first * num_units;
                    const int32_t* sums = inputs.sums + first * groups;
                    // Later rows find the panel in the cache; fetching the next one would push it out.
                    const int64_t ahead = first == 0 ? AHEAD * PANEL : 0;
                    switch (rows) {
                        case 1: return multiply_int8_tile<1>(from, sums, num_units, panel, ahead, scaled);
                        case 2: return multiply_int8_tile<2>(from, sums, num_units, panel, ahead, scaled);
                        case 3: return multiply_int8_tile<3>(from, sums, num_units, panel, ahead, scaled);
                        case 4: return multiply_int8_tile<4>(from, sums, num_units, panel, ahead, scaled);
                        case 5: return multiply_int8_tile<5>(from, sums, num_units, panel, ahead, scaled);
                        case 6: return multiply_int8_tile<6>(from, sums, num_units, panel, ahead, scaled);
                    }
                });
}

}  // namespace carousel
