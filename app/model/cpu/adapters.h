// LoRA adapters (Hu et al., 2021) beside the matrices of a decoder: rows × down × up is added to rows × matrix.
//
// The rows of each adapter are gathered for the product with `down`; what that gives is so small that each row's product
// with `up` is computed where the sums of the matrix are still in registers. Neither depends on the step's other rows.
#pragma once

#include <vector>

#include "matmul.h"

namespace carousel {

constexpr int64_t MOST_RANK = 64;
constexpr int MOST_PARTS = 3;                           // matrices whose outputs are computed together
constexpr int64_t LOW_STRIDE = MOST_PARTS * MOST_RANK;  // numbers of a row between both products; whole panels

// One adapter's share in one of a layer's products.
struct LowRank {
    const uint32_t* down;           // packed, the outputs of the parts one after the other; null: there is no share
    const uint32_t* up[MOST_PARTS];  // [outputs / LANES][rank / PER_UNIT][LANES] units, scaled
    int64_t rank[MOST_PARTS];       // even; 0: the adapter leaves this part as it is

    int64_t num_columns() const { return rank[0] + rank[1] + rank[2]; }
};

struct AdapterLayer {
    LowRank query_key_value, output, gate_up, down;
};

// The rows of a step by their adapters.
class AdaptedRows {
  public:
    struct Piece {  // rows of one adapter: order()[first ...]
        int64_t adapter, first, count;
    };

    // adapter_of(row): -1 for none.
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
    static constexpr int64_t PIECE_ROWS = 2 * 12;  // whole tiles; small, so that a team shares one adapter's rows

    std::vector<Piece> pieces_;
    std::vector<int64_t> order_, adapters_;
};

// What adapters add to one product of a step. `place(column)` says which part has LANES columns, and where.
template <typename T>
class Addition {
  public:
    struct Place {
        int64_t part, block;
    };

    Addition() = default;
    Addition(const AdaptedRows& rows, const AdapterLayer* const* adapters, int64_t num_adapters, int64_t layer,
             LowRank AdapterLayer::* product, T* low)
        : rows_(&rows), adapters_(adapters), layer_(layer), product_(product), low_(low) {
        for (int64_t adapter = 0; adapter < num_adapters; ++adapter) is_empty_ &= !of(adapter).down;
    }

    // Before the product, with its inputs; shared by the team.
    void reduce(Team& team, const T* inputs, int64_t num_inputs) const {
        if (is_empty_) return;
        team.share(rows_->pieces().size(), [&](int64_t task) {
            static thread_local std::vector<T> gathered;
            const AdaptedRows::Piece& piece = rows_->pieces()[task];
            const LowRank& own = of(piece.adapter);
            if (!own.down) return;
            const int64_t* rows = rows_->order().data() + piece.first;
            gathered.resize(piece.count * num_inputs);
            for (int64_t at = 0; at < piece.count; ++at)
                std::memcpy(gathered.data() + at * num_inputs, inputs + rows[at] * num_inputs, num_inputs * sizeof(T));
            LoopPart all{0, 1};
            multiply<T>(all, gathered.data(), piece.count, {own.down, num_inputs, own.num_columns()},
                        [&](int64_t at, int64_t column, Vector left, Vector right) {
                            T* const to = low_ + rows[at] * LOW_STRIDE + column;
                            store(round_to(left, T{}), to);
                            store(round_to(right, T{}), to + LANES);
                        });
        });
    }

    template <typename PlaceOf>
    void add(int64_t row, int64_t column, int64_t num_columns, Vector& left, Vector& right, PlaceOf&& place_of) const {
        if (is_empty_ || rows_->adapter_of(row) < 0) return;
        const LowRank& own = of(rows_->adapter_of(row));
        if (!own.down) return;
        add(own, row, place_of(column), left);
        if (column + LANES < num_columns) add(own, row, place_of(column + LANES), right);
    }

  private:
    const LowRank& of(int64_t adapter) const { return adapters_[adapter][layer_].*product_; }

    void add(const LowRank& own, int64_t row, const Place& place, Vector& to) const {
        const int64_t num_units = own.rank[place.part] / PER_UNIT<T>;
        const T* low = low_ + row * LOW_STRIDE;
        for (int64_t part = 0; part < place.part; ++part) low += own.rank[part];
        const uint32_t* places[1] = {own.up[place.part] + place.block * num_units * LANES};
        Vector sums[1][1] = {{to}};
        add_products<T, 1, 1>(sums, places, places, LANES, 0, reinterpret_cast<const uint32_t*>(low), 0, num_units);
        to = sums[0][0];
    }

    const AdaptedRows* rows_ = nullptr;
    const AdapterLayer* const* adapters_ = nullptr;
    int64_t layer_ = 0;
    LowRank AdapterLayer::* product_ = nullptr;
    T* low_ = nullptr;
    bool is_empty_ = true;
};

}  // namespace carousel
