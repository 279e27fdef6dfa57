// Multiplies rows by a packed weight matrix.
//
// Each output is a single sum over the inputs in their order, so that a row's bits do not depend on the other rows of
// the step (batch invariance).
#pragma once

#include "registers.h"
#include "thread_pool.h"
#include "vectors.h"

namespace carousel {

constexpr int PANEL = 2 * LANES;     // columns that are computed together
constexpr int TILE_WIDTH = MOST_SUMS >= 24 ? 2 : 1;  // vectors of a panel that are summed together
constexpr int TILE_ROWS = MOST_SUMS / TILE_WIDTH;    // rows that are summed together
constexpr int64_t CHUNK_ROWS = 192;  // rows whose inputs stay in the L2 cache while panels are read
constexpr int64_t FETCHING_TILES = 4;  // only a panel's first tiles prefetch the next panel, which is then cached

// A packed matrix, [num_columns / PANEL][num_units][PANEL] units. The last panel is padded with zeros.
struct Matrix {
    const uint32_t* panels;
    int64_t num_inputs;
    int64_t num_columns;  // outputs
};

// Reads a column of a packed matrix.
template <typename T>
inline void read_column(const Matrix& matrix, int64_t column, float* to) {
    const int64_t num_units = matrix.num_inputs / PER_UNIT<T>;
    const uint32_t* unit = matrix.panels + column / PANEL * PANEL * num_units + column % PANEL;
    for (int64_t first = 0; first < matrix.num_inputs; first += LANES) {
        uint32_t units[LANES / PER_UNIT<T>];
        for (uint32_t& own : units) {
            own = *unit;
            unit += PANEL;
        }
        T numbers[LANES];
        std::memcpy(numbers, units, sizeof(numbers));
        store(load(numbers), to + first);
    }
}

// The addresses that a tile prefetches while it reads a panel, one per unit, `stride` apart; null for none. Addresses
// past the end are harmless.
struct Ahead {
    const uint32_t* from;
    int64_t stride;
};

// sums: of the panel's two halves, for each row. Not inlined, because it has many callers and compiles slowly.
template <typename T, int ROWS>
[[gnu::noinline]] void multiply_tile(const uint32_t* inputs, int64_t num_units, const uint32_t* panel,
                                     const Ahead& next, Vector (*sums)[2]) {
    constexpr int WIDTH = 3 * ROWS <= MOST_SUMS ? 2 : TILE_WIDTH;  // with few rows, registers hold a whole panel
#pragma GCC unroll 2
    for (int pass = 0; pass < 2 / WIDTH; ++pass) {
        const uint32_t *places[WIDTH], *ahead[WIDTH];
        for (int at = 0; at < WIDTH; ++at) {
            places[at] = panel + (pass * WIDTH + at) * LANES;
            ahead[at] = next.from + (pass * WIDTH + at) * LANES;
        }
        Vector own[ROWS][WIDTH] = {};
        add_products<Factor<T>, ROWS, WIDTH>(own, places, ahead, PANEL, next.stride, inputs, FACTOR_WORDS<T> * num_units,
                                             num_units);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row)  // copying all at once would make GCC keep them in memory
#pragma GCC unroll 2
            for (int at = 0; at < WIDTH; ++at) sums[row][pass * WIDTH + at] = own[row][at];
    }
}

template <typename T>
inline void multiply_rows(int rows, const uint32_t* inputs, int64_t num_units, const uint32_t* panel,
                          const Ahead& next, Vector (*sums)[2]) {
    switch (rows) {
#define CASE(ROWS) \
    case ROWS:     \
        if constexpr (ROWS <= TILE_ROWS) return multiply_tile<T, ROWS>(inputs, num_units, panel, next, sums);
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
}

// Configures tiles for products: tiles 0 to 3 hold sums, 4 and 5 inputs, 6 and 7 weights.
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

// Like `multiply_tile` for one or two BLOCKS of amx::ROWS rows. sums: [rows][PANEL]. Prefetches nothing, because that
// made products with tiles slower.
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

// The argument of `share_tiles` for a product without updates.
struct NothingAdded {
    struct Columns {
        void add(int64_t, Vector (&)[2]) const {}
    };
    Columns columns(int64_t, int64_t, int64_t) const { return {}; }
};

// Calls finish(row, column, left, right) for every row and every panel, whose first column is `column`.
//
// tile(rows, first, column, panel, next, sums) computes the sums of at most MAX_ROWS rows from `first` on. Tiles are
// whole blocks of rows, except at the end. next: the part of the next panel that the tile prefetches. panel_units: the
// units of PANEL columns. added.columns(first, end, column) returns an object whose add(row, sums) adds updates to
// a panel's sums. threads: a ThreadPool, or a LoopPart of the columns.
template <int MAX_ROWS, typename Sharing, typename Tile, typename Finish, typename Added>
void share_tiles(Sharing& threads, int64_t num_rows, int block, const Matrix& matrix, int64_t panel_units, Tile&& tile,
                 Finish&& finish, const Added& added) {
    const int64_t num_panels = (matrix.num_columns + PANEL - 1) / PANEL;
    const int64_t num_chunks = (num_rows + CHUNK_ROWS - 1) / CHUNK_ROWS, num_blocks = (num_rows + block - 1) / block;
    threads.share_runs(num_chunks * num_panels, [&](int64_t task) {
        const int64_t column = task % num_panels * PANEL;
        const uint32_t* panel = matrix.panels + column * panel_units;
        const int64_t chunk = task / num_panels;
        const int64_t end = std::min(num_rows, num_blocks * (chunk + 1) / num_chunks * block);
        int64_t first = num_blocks * chunk / num_chunks * block;
        int64_t num_tiles = (end - first + MAX_ROWS - 1) / MAX_ROWS, num_fetching = std::min(num_tiles, FETCHING_TILES);
        Ahead next{panel + PANEL * panel_units, PANEL / num_fetching};
        const auto additions = added.columns(first, end, column);
        for (; num_tiles > 0; --num_tiles) {
            const int64_t even = (end - first + num_tiles - 1) / num_tiles;  // so that tiles are of nearly equal size
            const int rows = int(std::min(end - first, (even + block - 1) / block * block));
            Vector sums[MAX_ROWS][2];
            tile(rows, first, column, panel, next, sums);
            next.from += next.stride * panel_units;
            if (--num_fetching == 0) next.stride = 0;
            for (int row = 0; row < rows; ++row) {
                additions.add(first + row, sums[row]);
                finish(first + row, column, sums[row][0], sums[row][1]);
            }
            first += rows;
        }
    });
}

// Provides input rows in the form for multiplication, to one thread in one product. Converts a chunk's rows only once.
template <typename T>
class Factors {
  public:
    Factors(const T* inputs, int64_t size) : inputs_(inputs), size_(size) {}

    // Returns rows from `first` on. Must be called in the order of rows, with the same rows for each panel.
    const uint32_t* rows(int64_t first, int64_t count) {
        const int64_t words = words_of<T>(size_);
        if constexpr (std::is_same_v<Factor<T>, T>) return reinterpret_cast<const uint32_t*>(inputs_) + first * words;
        const bool is_of_other_chunk = first < begin_ || first > end_ || first + count > begin_ + CHUNK_ROWS;
        if (is_of_other_chunk) begin_ = end_ = first;
        const auto needed = size_t((first + count - begin_) * words);
        if (converted_.size() < needed) converted_.resize(needed);
        for (; end_ < first + count; ++end_)
            copy_factors(inputs_ + end_ * size_, size_, converted_.data() + (end_ - begin_) * words);
        return converted_.data() + (first - begin_) * words;
    }

  private:
    const T* const inputs_;
    const int64_t size_;
    int64_t begin_ = 0, end_ = 0;  // the rows in `converted_`
    static inline thread_local std::vector<uint32_t> converted_;
};

// Calls finish(row, column, left, right) for every row and every panel, with the sums of LANES columns from `column` on
// and of the next LANES columns. inputs: [num_rows][num_inputs]. added: see `share_tiles`.
template <typename T, typename Sharing, typename Finish, typename Added = NothingAdded>
void multiply(Sharing& threads, const T* inputs, int64_t num_rows, const Matrix& matrix, Finish&& finish,
              const Added& added = {}) {
    const uint32_t* units = reinterpret_cast<const uint32_t*>(inputs);
    const int64_t num_units = matrix.num_inputs / PER_UNIT<T>;
    if (amx::fits<T>(matrix.num_inputs))
        return share_tiles<2 * amx::ROWS>(
            threads, num_rows, amx::ROWS, matrix, num_units,
            [&](int rows, int64_t first, int64_t, const uint32_t* panel, const Ahead&, Vector (*sums)[2]) {
                configure_products(rows);
                sum_in_amx<bf16>(rows, units + first * num_units, num_units, num_units, panel,
                                 reinterpret_cast<float*>(sums));
            },
            finish, added);
    Factors<T> factors(inputs, matrix.num_inputs);
    share_tiles<TILE_ROWS>(
        threads, num_rows, 1, matrix, num_units,
        [&](int rows, int64_t first, int64_t, const uint32_t* panel, const Ahead& next, Vector (*sums)[2]) {
            multiply_rows<T>(rows, factors.rows(first, rows), num_units, panel, next, sums);
        },
        finish, added);
}

}  // namespace carousel
