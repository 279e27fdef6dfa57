// LoRA adapters (Hu et al., 2021) for a decoder's matrices: adds rows × down × up to rows × matrix.
//
// The rows of an adapter are computed together, so that a step reads the adapter's numbers only once: `down` before the
// product, and `up` panel by panel, before the panel's own products. No result depends on the step's other rows.
#pragma once

#include <vector>

#include "matmul.h"

namespace carousel {

constexpr int64_t MOST_RANK = 64;
constexpr int MOST_PARTS = 3;                           // the most matrices in one product
constexpr int64_t LOW_STRIDE = MOST_PARTS * MOST_RANK;  // numbers of a row between `down` and `up`

// An adapter's matrices for one product of a layer, packed in LANES columns: [columns / LANES][units][LANES] units.
struct LowRank {
    const uint32_t* down;            // its columns are the ranks of all parts; null without an update
    const uint32_t* up[MOST_PARTS];  // its columns are outputs; includes the adapter's scale
    int64_t rank[MOST_PARTS];        // even; 0 if the adapter does not change this part

    int64_t num_columns() const { return rank[0] + rank[1] + rank[2]; }
};

struct AdapterLayer {
    LowRank query_key_value, output, gate_up, down;
};

// The matrices that a product joins, either one after another or by alternating LANES columns of each.
struct Parts {
    int64_t num_columns[MOST_PARTS];
    bool in_turn;

    struct Place {
        int64_t part, block;  // in LANES columns
    };

    // Columns past the end belong to part MOST_PARTS.
    Place place_of(int64_t column) const {
        if (in_turn) return {column < 2 * num_columns[0] ? column / LANES % 2 : MOST_PARTS, column / PANEL};
        int64_t part = 0;
        for (; part < MOST_PARTS && column >= num_columns[part]; ++part) column -= num_columns[part];
        return {part, column / LANES};
    }
};

// Computes the sums of LANES columns for each row. Prefetches the same number of units from `ahead`.
template <typename T, int ROWS>
[[gnu::noinline]] void multiply_lanes(const T* rows, int64_t row_stride, int64_t num_inputs, const uint32_t* columns,
                                      const uint32_t* ahead, Vector* sums) {
    const uint32_t *places[1] = {columns}, *next[1] = {ahead};
    FloatPart own[ROWS][PARTS] = {};
    add_in_registers<T, ROWS, 1>(own, places, next, LANES, LANES, reinterpret_cast<const uint32_t*>(rows),
                                 row_stride / PER_UNIT<T>, num_inputs / PER_UNIT<T>, ~0u);
    std::memcpy(sums, own, sizeof(own));
}

// Like above for any number of rows. Calls to(row, sums).
template <typename T, typename To>
void multiply_lanes(const T* rows, int64_t num_rows, int64_t row_stride, int64_t num_inputs, const uint32_t* columns,
                    const uint32_t* ahead, To&& to) {
    for (int64_t first = 0; first < num_rows; first += TILE_ROWS) {
        const T* own = rows + first * row_stride;
        const int64_t count = std::min<int64_t>(TILE_ROWS, num_rows - first);
        Vector sums[TILE_ROWS];
        switch (count) {
#define CASE(ROWS)                                                                                 \
    case ROWS:                                                                                     \
        if constexpr (ROWS <= TILE_ROWS)                                                           \
            multiply_lanes<T, ROWS>(own, row_stride, num_inputs, columns, ahead, sums);            \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
        }
        for (int64_t row = 0; row < count; ++row) to(first + row, sums[row]);
    }
}

// A step's rows, grouped by adapter.
class AdaptedRows {
  public:
    struct Piece {  // rows of one adapter: order()[first ...]
        int64_t adapter, first, count;
    };

    // adapter_of(row) returns the index of a row's adapter, or -1.
    template <typename AdapterOf>
    void find(int64_t num_rows, int64_t num_adapters, AdapterOf&& adapter_of) {
        pieces_.clear();
        order_.clear();
        adapters_.resize(num_rows);
        for (int64_t row = 0; row < num_rows; ++row) adapters_[row] = adapter_of(row);
        for (int64_t adapter = 0; adapter < num_adapters; ++adapter) {
            int64_t first = order_.size();
            for (int64_t row = 0; row < num_rows; ++row)
                if (adapters_[row] == adapter) order_.push_back(row);
            for (const int64_t end = order_.size(); first < end; first += PIECE_ROWS)
                pieces_.push_back({adapter, first, std::min(PIECE_ROWS, end - first)});
        }
    }

    const std::vector<Piece>& pieces() const { return pieces_; }
    const std::vector<int64_t>& order() const { return order_; }
    int64_t adapter_of(int64_t row) const { return adapters_[row]; }

  private:
    static constexpr int64_t PIECE_ROWS = 12;  // whole tiles; small, so that threads can share one adapter's rows

    std::vector<Piece> pieces_;
    std::vector<int64_t> order_, adapters_;
};

// The updates that adapters add to one product of a step. Passed to `share_tiles`.
template <typename T>
class Addition {
  public:
    Addition() = default;
    Addition(const AdaptedRows& rows, const AdapterLayer* const* adapters, int64_t num_adapters, int64_t layer,
             LowRank AdapterLayer::* product, const Parts& parts, T* low)
        : rows_(&rows), adapters_(adapters), layer_(layer), product_(product), parts_(parts), low_(low) {
        for (int64_t adapter = 0; adapter < num_adapters; ++adapter) is_empty_ &= !of(adapter).down;
    }

    // Multiplies the inputs by `down`. Call before the product; the threads of the pool share the work.
    void reduce(ThreadPool& threads, const T* inputs, int64_t num_inputs) const {
        if (is_empty_) return;
        threads.share(rows_->pieces().size(), [&](int64_t task) { reduce(rows_->pieces()[task], inputs, num_inputs); });
    }

    // A panel's updates for some rows. They are valid until the thread calls `columns` again.
    class Columns {
      public:
        void add(int64_t row, Vector (&sums)[2]) const {
            if (!sums_ || !addition_->is_adapted(row)) return;
            sums[0] += sums_[2 * (row - first_)];
            sums[1] += sums_[2 * (row - first_) + 1];
        }

      private:
        friend Addition;
        const Addition* addition_ = nullptr;
        const Vector* sums_ = nullptr;  // [rows][2]
        int64_t first_ = 0;
    };

    Columns columns(int64_t first, int64_t end, int64_t column) const {
        Columns result;
        if (is_empty_) return result;
        static thread_local std::vector<Vector> sums;
        sums.resize(2 * (end - first));
        for (const AdaptedRows::Piece& piece : rows_->pieces())
            if (of(piece.adapter).down) expand(piece, first, end, column, sums.data());
        result.addition_ = this;
        result.sums_ = sums.data();
        result.first_ = first;
        return result;
    }

  private:
    const LowRank& of(int64_t adapter) const { return adapters_[adapter][layer_].*product_; }

    bool is_adapted(int64_t row) const {
        const int64_t adapter = rows_->adapter_of(row);
        return adapter >= 0 && of(adapter).down;
    }

    void reduce(const AdaptedRows::Piece& piece, const T* inputs, int64_t num_inputs) const {
        static thread_local std::vector<T> gathered;
        const LowRank& own = of(piece.adapter);
        if (!own.down) return;
        const int64_t* rows = rows_->order().data() + piece.first;
        constexpr int64_t AHEAD = 32 * LANES;  // units
        for (int64_t unit = 0; unit < AHEAD; unit += LANES) __builtin_prefetch(own.down + unit);
        gathered.resize(piece.count * num_inputs);
        for (int64_t at = 0; at < piece.count; ++at)
            std::memcpy(gathered.data() + at * num_inputs, inputs + rows[at] * num_inputs, num_inputs * sizeof(T));
        for (int64_t column = 0; column < own.num_columns(); column += LANES) {
            const uint32_t* columns = own.down + column * (num_inputs / PER_UNIT<T>);
            multiply_lanes<T>(gathered.data(), piece.count, num_inputs, num_inputs, columns, columns + AHEAD,
                              [&](int64_t at, Vector sums) {
                                  store(round_to(sums, T{}), low_ + (piece.first + at) * LOW_STRIDE + column);
                              });
        }
    }

    // sums: [end - first][2]. Writes the sums of the piece's rows between `first` and `end`.
    void expand(const AdaptedRows::Piece& piece, int64_t first, int64_t end, int64_t column, Vector* sums) const {
        const int64_t* const order = rows_->order().data();
        const int64_t *begin = order + piece.first, *last = begin + piece.count;
        while (begin < last && *begin < first) ++begin;
        while (begin < last && last[-1] >= end) --last;
        const int64_t num_rows = last - begin;
        const LowRank& own = of(piece.adapter);
        for (int half = 0; half < 2; ++half) {
            const Parts::Place place = parts_.place_of(column + half * LANES);
            if (place.part == MOST_PARTS) continue;
            const T* low = low_ + (begin - order) * LOW_STRIDE;
            for (int64_t part = 0; part < place.part; ++part) low += own.rank[part];
            const int64_t rank = own.rank[place.part], units = rank / PER_UNIT<T> * LANES;
            const uint32_t* columns = own.up[place.part] + place.block * units;
            multiply_lanes<T>(low, num_rows, LOW_STRIDE, rank, columns, columns + (parts_.in_turn ? 1 : 2) * units,
                              [&](int64_t at, Vector row) { sums[2 * (begin[at] - first) + half] = row; });
        }
    }

    const AdaptedRows* rows_ = nullptr;
    const AdapterLayer* const* adapters_ = nullptr;
    int64_t layer_ = 0;
    LowRank AdapterLayer::* product_ = nullptr;
    Parts parts_ = {};
    T* low_ = nullptr;  // [order() of the rows][LOW_STRIDE]
    bool is_empty_ = true;
};

}  // namespace carousel
