// Compares products of a matrix with the blocks of a GGUF file with sums in doubles. Returns 0, or 1 where they differ.
#include <cstdio>
#include <random>

#include "stored.cpp"

namespace {

constexpr int64_t NUM_INPUTS = 512, NUM_COLUMNS = 40, MOST_ROWS = 14;
constexpr int64_t TYPES[] = {Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, Q4_K, Q5_K, Q6_K, IQ4_XS};

// Blocks of random bytes, or of bytes that give the greatest sums, whose factors are ones or small.
std::vector<uint8_t> rows_of(int64_t type, int64_t count, std::mt19937& random) {
    const Format format = format_of(type);
    const int64_t num_blocks = count * NUM_INPUTS / inputs_of(format.kind);
    std::vector<uint8_t> bytes(num_blocks * format.bytes);
    for (int64_t block = 0; block < num_blocks; ++block) {
        uint8_t* own = bytes.data() + block * format.bytes;
        const bool is_greatest = random() % 4 == 0;
        for (int64_t at = 0; at < format.bytes; ++at) own[at] = is_greatest ? 0xff : uint8_t(random());
        const uint16_t factors[] = {0x3c00, 0x0123, 0x8077, 0xbc00};  // 1, two denormal numbers, -1
        const auto put = [&](int64_t at) { std::memcpy(own + at, &factors[random() % 4], sizeof(uint16_t)); };
        put(type == Q6_K ? 208 : 0);
        if (type == Q4_1 || type == Q5_1 || type == Q4_K || type == Q5_K) put(2);
    }
    return bytes;
}

bool check(ThreadPool& threads, int64_t first_type, int64_t type, std::mt19937& random) {
    // Two strips of one type, then half a strip of another.
    std::vector<uint8_t> rows[3];
    std::vector<StripSource> sources;
    int64_t line = 1;
    for (int64_t strip = 0; strip < 4; ++strip) {
        const int64_t own = strip == 0 ? first_type : type, count = strip < 2 ? LANES : strip == 2 ? NUM_COLUMNS - 2 * LANES : 0;
        if (count) rows[strip] = rows_of(own, count, random);
        sources.push_back({own, count ? int64_t(rows[strip].data()) : 0, count, line});
        line += carousel_stored_lines(own, NUM_INPUTS);
    }
    std::vector<uint32_t> matrix((line + AHEAD + 8) * LANES);
    carousel_pack_stored(&threads, sources.data(), sources.size(), NUM_INPUTS, matrix.data());
    std::vector<float> weights(NUM_COLUMNS * NUM_INPUTS), column(NUM_INPUTS);
    for (int64_t strip = 0; strip < 3; ++strip)
        carousel_dequantise(&threads, sources[strip].type, rows[strip].data(), sources[strip].num_rows * NUM_INPUTS,
                            weights.data() + strip * LANES * NUM_INPUTS);

    std::vector<float> inputs(MOST_ROWS * NUM_INPUTS);
    std::vector<int8_t> numbers((MOST_ROWS + STRIP_ROWS) * NUM_INPUTS), block_numbers(numbers.size());
    std::vector<float> scales(numbers.size() / GROUP), sums(scales.size()), block_scales(numbers.size() / BLOCK);
    std::vector<uint32_t> block_sums(block_scales.size() * SUM_WORDS);
    const StoredRows rounded{{numbers.data(), scales.data(), sums.data()},
                             {block_numbers.data(), block_scales.data(), block_sums.data()}};
    for (int64_t row = 0; row < MOST_ROWS; ++row) {
        float* const own = inputs.data() + row * NUM_INPUTS;
        for (int64_t at = 0; at < NUM_INPUTS; ++at)
            own[at] = row % 3 == 0 ? 127.0f : row % 3 == 1 ? -127.0f : float(int(random() % 255) - 127);
        for (int64_t at = 0; at < NUM_INPUTS; at += GROUP) own[at] = 127.0f;  // whole numbers stay what they are
        quantise<4>(own, NUM_INPUTS, rounded.groups, row);
        quantise_blocks(own, NUM_INPUTS, rounded.blocks, row);
    }
    std::vector<float> results(MOST_ROWS * 2 * PANEL);
    for (int64_t num_rows = 1; num_rows <= MOST_ROWS; ++num_rows) {
        threads.run([&] {
            multiply_stored<float>(threads, inputs.data(), rounded, num_rows, {matrix.data(), NUM_INPUTS, NUM_COLUMNS},
                                   [&](int64_t row, int64_t at, Vector left, Vector right) {
                                       store(left, &results[row * 2 * PANEL + at]);
                                       store(right, &results[row * 2 * PANEL + at + LANES]);
                                   });
        });
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t at = 0; at < NUM_COLUMNS; ++at) {
                double sum = 0.0, magnitude = 1e-6;
                for (int64_t input = 0; input < NUM_INPUTS; ++input) {
                    const double part = double(weights[at * NUM_INPUTS + input]) * inputs[row * NUM_INPUTS + input];
                    sum += part, magnitude += std::abs(part);
                }
                const float own = results[row * 2 * PANEL + at];
                if (std::abs(own - sum) <= 1e-5 * magnitude) continue;
                std::printf("types %d and %d, %d rows: row %d, column %d is %g, not %g\n", int(first_type), int(type),
                            int(num_rows), int(row), int(at), own, sum);
                return false;
            }
    }
    for (int64_t row = 0; row < MOST_ROWS; ++row)  // its bits do not depend on the rows beside it
        for (const int half : {0, 1}) {
            Vector own[STRIP_ROWS][2];
            const Strip& strip = strip_of(matrix.data(), half * LANES);
            multiply_strip(strip, numbers_of(matrix.data(), strip), 1, rows_from(rounded, row, NUM_INPUTS), NUM_INPUTS, half, own);
            if (std::memcmp(&own[0][half], &results[row * 2 * PANEL + half * LANES], sizeof(Vector)) == 0) continue;
            return std::printf("type %d: row %d has other bits alone\n", int(strip.kind), int(row)), false;
        }
    for (int64_t at = 0; at < NUM_COLUMNS; ++at) {
        read_stored_column<float>({matrix.data(), NUM_INPUTS, NUM_COLUMNS}, at, column.data());
        for (int64_t input = 0; input < NUM_INPUTS; ++input)
            if (column[input] != weights[at * NUM_INPUTS + input]) return std::printf("column %d\n", int(at)), false;
    }
    return true;
}

}  // namespace

int main() {
    std::mt19937 random(1);
    ThreadPool threads(1);
    for (const int64_t type : TYPES)
        if (!check(threads, type, type, random) || !check(threads, Q8_0, type, random)) return 1;
    return 0;
}
