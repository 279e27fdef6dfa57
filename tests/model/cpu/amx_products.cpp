// Compares `multiply` of bfloat16 in plain tiles with the order of sums that Intel documents for TDPBF16PS.
#include <cstdio>
#include <random>

#include "matmul.h"

using namespace carousel;

namespace {

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

float as_float(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return flushed(result);
}

// One output: of each 16 pairs of inputs the sum of the first and that of the second products, then both together.
float documented(const bf16* row, int64_t num_inputs, const std::vector<bf16>& weights) {
    float sum = 0.0f;
    for (int64_t first = 0; first < num_inputs; first += 32) {
        float even = 0.0f, odd = 0.0f;
        for (int64_t at = first; at < first + 32; at += 2) {
            even = flushed(std::fma(as_float(row[at]), as_float(weights[at]), even));
            odd = flushed(std::fma(as_float(row[at + 1]), as_float(weights[at + 1]), odd));
        }
        sum = flushed(sum + flushed(even + odd));
    }
    return sum;
}

struct Product {
    int64_t num_inputs, num_columns;
    std::vector<std::vector<bf16>> weights;  // by column
    std::vector<uint32_t> panels;

    Product(int64_t num_inputs, int64_t num_columns, std::mt19937& random)
        : num_inputs(num_inputs), num_columns(num_columns) {
        panels.resize((num_columns + PANEL - 1) / PANEL * PANEL * num_inputs / 2);
        for (int64_t column = 0; column < num_columns; ++column) {
            weights.push_back(numbers(num_inputs, random));
            for (int64_t unit = 0; unit < num_inputs / 2; ++unit)
                std::memcpy(&panels[(column / PANEL * num_inputs / 2 + unit) * PANEL + column % PANEL],
                            &weights.back()[2 * unit], sizeof(uint32_t));
        }
    }

    // Of many sizes, some of them so small that they or their products are denormal.
    static std::vector<bf16> numbers(int64_t count, std::mt19937& random) {
        std::vector<bf16> result(count);
        for (bf16& number : result) {
            const float x = std::ldexp(std::normal_distribution<float>()(random), random() % 8 ? 0 : -int(random() % 140));
            uint32_t bits;
            std::memcpy(&bits, &x, sizeof(bits));
            number.bits = uint16_t(bits >> 16);
        }
        return result;
    }

    std::vector<float> multiply(ThreadPool& threads, const bf16* inputs, int64_t num_rows) const {
        // Exactly as long as the rows are: the address sanitiser sees what is read or written behind them.
        const std::vector<bf16> own(inputs, inputs + num_rows * num_inputs);
        std::vector<float> sums(num_rows * num_columns, -1.0f);
        const auto finish = [&](int64_t row, int64_t column, Vector left, Vector right) {
            for (int64_t at = 0; at < PANEL && column + at < num_columns; ++at)
                sums[row * num_columns + column + at] = at < LANES ? left[at] : right[at - LANES];
        };
        threads.run([&] { carousel::multiply(threads, own.data(), num_rows, {panels.data(), num_inputs, num_columns}, finish); });
        return sums;
    }
};

bool check(ThreadPool& threads, int64_t num_inputs, int64_t num_columns, int64_t num_rows, std::mt19937& random) {
    const Product product(num_inputs, num_columns, random);
    const std::vector<bf16> inputs = Product::numbers(num_rows * num_inputs, random);
    const std::vector<float> sums = product.multiply(threads, inputs.data(), num_rows);
    for (int64_t row = 0; row < num_rows; ++row) {
        const bf16* own = inputs.data() + row * num_inputs;
        const std::vector<float> alone = row % 7 ? std::vector<float>() : product.multiply(threads, own, 1);
        for (int64_t column = 0; column < num_columns; ++column) {
            const float sum = sums[row * num_columns + column];
            const bool is_right = num_inputs % 32 || sum == documented(own, num_inputs, product.weights[column]);
            if (is_right && (alone.empty() || sum == alone[column])) continue;
            std::printf("%d inputs, %d columns, %d rows: row %d, column %d is %g\n", int(num_inputs), int(num_columns),
                        int(num_rows), int(row), int(column), sum);
            return false;
        }
    }
    return true;
}

}  // namespace

int main() {
    std::mt19937 random(1);
    ThreadPool threads(2);
    for (int64_t num_rows = 1; num_rows <= 70; ++num_rows)
        if (!check(threads, 64, 48, num_rows, random)) return 1;
    for (const int64_t num_rows : {1, 17, 192, 193, 230, 400})
        for (const int64_t num_inputs : {32, 96, 160, 48, 80, 16})
            if (!check(threads, num_inputs, num_inputs == 96 ? 32 : 16, num_rows, random)) return 1;
    return 0;
}
