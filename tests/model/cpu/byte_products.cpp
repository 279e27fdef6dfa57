// Compares products of quantised weights with whole numbers that are summed one by one. Returns the build's `Dot`, or -1
// where they differ.
#include <cstdio>
#include <random>

#include "quantised.h"

using namespace carousel;

namespace {

constexpr int64_t NUM_INPUTS = 192, NUM_COLUMNS = 2 * PANEL, MOST_ROWS = 30;
constexpr uint32_t ONE = 0x3f80;  // in bfloat16: a scale of 1, above a least weight of 0

// Either any number of a range or its ends: the greatest sums need the latter.
int number(int least, int most, std::mt19937& random) {
    const int choice = int(random() % 4);
    return choice == 0 ? least : choice == 1 ? most : least + int(random() % uint32_t(most - least + 1));
}

template <int BITS>
struct Weights {
    static constexpr int64_t SIZE = Grouping<BITS>::SIZE, PER_WORD = PER_UNIT<int8_t>;

    std::vector<int> numbers;  // [NUM_COLUMNS][NUM_INPUTS]
    std::vector<uint32_t> panels;

    explicit Weights(std::mt19937& random)
        : numbers(NUM_COLUMNS * NUM_INPUTS), panels(NUM_COLUMNS * panel_units<BITS>(NUM_INPUTS)) {
        for (int64_t column = 0; column < NUM_COLUMNS; ++column) {
            const bool is_greatest = column % 5 == 0;
            for (int64_t input = 0; input < NUM_INPUTS; ++input) {
                const int own = is_greatest ? (1 << BITS) - 1 : number(0, (1 << BITS) - 1, random);
                numbers[column * NUM_INPUTS + input] = own;
                const int64_t at = input % SIZE, half = BITS == 4 ? at / (SIZE / 2) : 0, place = at - half * (SIZE / 2);
                word(column, input / SIZE, 0) = ONE;
                word(column, input / SIZE, 1 + place / PER_WORD) |= uint32_t(own) << (place % PER_WORD * 8 + half * 4);
            }
        }
    }

    uint32_t& word(int64_t column, int64_t group, int64_t at) {
        const int64_t first = column / PANEL * panel_units<BITS>(NUM_INPUTS) + group * (1 + GROUP_WORDS<BITS>);
        return panels[(first + at) * PANEL + column % PANEL];
    }
};

template <int BITS>
bool check(ThreadPool& threads, std::mt19937& random) {
    const Weights<BITS> weights(random);
    std::vector<int8_t> numbers(MOST_ROWS * NUM_INPUTS);
    for (int64_t at = 0; at < int64_t(numbers.size()); ++at)
        numbers[at] = int8_t(at / NUM_INPUTS % 4 == 0 ? 127 : at / NUM_INPUTS % 4 == 1 ? -127 : number(-127, 127, random));
    std::vector<float> scales(MOST_ROWS * num_groups<BITS>(NUM_INPUTS), 1.0f), sums(scales.size(), 0.0f);
    for (int64_t num_rows = 1; num_rows <= MOST_ROWS; ++num_rows) {
        std::vector<float> results(num_rows * NUM_COLUMNS);
        threads.run([&] {
            multiply_quantised<BITS>(threads, {numbers.data(), scales.data(), sums.data()}, num_rows,
                                     {weights.panels.data(), NUM_INPUTS, NUM_COLUMNS},
                                     [&](int64_t row, int64_t column, Vector left, Vector right) {
                                         store(left, &results[row * NUM_COLUMNS + column]);
                                         store(right, &results[row * NUM_COLUMNS + column + LANES]);
                                     });
        });
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t column = 0; column < NUM_COLUMNS; ++column) {
                int64_t sum = 0;
                for (int64_t input = 0; input < NUM_INPUTS; ++input)
                    sum += weights.numbers[column * NUM_INPUTS + input] * numbers[row * NUM_INPUTS + input];
                const float own = results[row * NUM_COLUMNS + column];
                if (own == float(sum)) continue;
                std::printf("%d bits, %d rows: row %d, column %d is %f, not %d\n", BITS, int(num_rows), int(row),
                            int(column), own, int(sum));
                return false;
            }
    }
    return true;
}

}  // namespace

int main() {
    std::mt19937 random(1);
    ThreadPool threads(1);
    return check<8>(threads, random) && check<4>(threads, random) ? int(DOT) : -1;
}
