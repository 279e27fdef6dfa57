// Loops of a pool, of which each reads what the one before has written, against the same loops on one thread.
//
// The thread sanitiser says where one goes on too early. There are more threads than a small machine has CPUs, so some
// lag behind; members that lag find loops done.

#include "thread_pool.h"

#include <cstdio>
#include <cstdlib>

namespace {

constexpr int64_t SIZE = 23;

// Sums of neighbours, then of all: several loops and one that only one member computes.
template <typename Pool>
void compute(Pool& pool, int64_t num_loops, std::vector<uint64_t>& numbers, std::vector<uint64_t>& sums) {
    for (int64_t loop = 0; loop < num_loops; ++loop) {
        pool.share_runs(SIZE, [&](int64_t at) { sums[at] = numbers[at] * 3 + numbers[(at + 1) % SIZE] + loop; });
        pool.share(SIZE, [&](int64_t at) { numbers[at] = sums[at] ^ sums[(at + 5) % SIZE]; });
        if (loop % 7 == 0) pool.share(1, [&](int64_t) { numbers[loop % SIZE] += sums[0]; });
        if (loop % 11 == 0) pool.share_runs(0, [&](int64_t) { std::abort(); });
        if (loop % 13 == 0) pool.meet();
    }
}

struct Alone {
    template <typename Body>
    void share(int64_t count, Body&& body) {
        for (int64_t at = 0; at < count; ++at) body(at);
    }
    template <typename Body>
    void share_runs(int64_t count, Body&& body) {
        share(count, body);
    }
    void meet() {}
};

}  // namespace

int main() {
    for (const int num_threads : {1, 2, 3, 5}) {
        carousel::ThreadPool pool(num_threads);
        Alone alone;
        std::vector<uint64_t> numbers(SIZE, 1), expected(SIZE, 1), sums(SIZE), expected_sums(SIZE);
        for (const int64_t num_loops : {1, 0, 2, 300, 3, 1200, 3000, 1}) {  // some are more than the pool has records of
            pool.run([&] { compute(pool, num_loops, numbers, sums); });
            compute(alone, num_loops, expected, expected_sums);
            if (numbers != expected) {
                std::printf("%d threads, %d loops: other numbers\n", num_threads, int(num_loops));
                return 1;
            }
        }
    }
}
