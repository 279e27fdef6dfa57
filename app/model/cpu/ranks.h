// The ranks that compute a model together: processes of one machine, each with a part of every matrix. They exchange
// numbers through memory that all of them have mapped.
//
// Every rank writes its numbers to its own place, and all meet; then each reads the numbers of all. There are two sets of
// places, in turn: when a rank writes to a set again, all have met once more, so all have read what it had there.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "vectors.h"

namespace carousel {

struct RanksShape {
    int64_t rank, size;
    int64_t capacity;   // floats that a rank gives at a time; of one rank without a bound
    double timeout_s;   // for which a rank waits for the others
    void* memory;       // [size] lines, then [2][size][capacity] floats; zeroed before the first rank begins
};

class Ranks {
  public:
    explicit Ranks(const RanksShape& shape) : shape_(shape) {
        // Those before it may have met here.
        if (shape.size > 1) num_meetings_ = line(shape.rank).num_meetings.load(std::memory_order_relaxed);
    }

    int64_t rank() const { return shape_.rank; }
    int64_t size() const { return shape_.size; }
    int64_t capacity() const { return shape_.capacity; }

    // Where this rank writes what the others read after the next meeting.
    float* own() const { return place(shape_.rank, num_meetings_); }

    // What another rank has written before the last meeting.
    const float* of(int64_t rank) const { return place(rank, num_meetings_ - 1); }

    // LANES numbers summed over the ranks, in their order: the same bits on all of them.
    Vector sum(int64_t at) const {
        Vector sum = load(of(0) + at);
        for (int64_t rank = 1; rank < shape_.size; ++rank) sum += load(of(rank) + at);
        return sum;
    }

    // Waits until all have written. Of a team only one member calls it.
    void meet() {
        line(shape_.rank).num_meetings.store(++num_meetings_, std::memory_order_release);
        for (int64_t rank = 0; rank < shape_.size && missing_ < 0; ++rank)
            if (!has_come(rank)) missing_ = rank;
    }

    // A rank that did not come in time; -1: none. From then on no rank is waited for, and all numbers are worthless.
    int64_t missing() const { return missing_; }

  private:
    struct alignas(64) Line {  // of a rank
        std::atomic<uint64_t> num_meetings;
        std::atomic<uint64_t> is_aborted;  // set by another thread of it: it waits no longer
    };

    bool has_come(int64_t rank) const {
        constexpr int SPINS = 4000, YIELDS = 2000;  // together about a millisecond
        const auto &theirs = line(rank).num_meetings, &is_aborted = line(shape_.rank).is_aborted;
        std::chrono::steady_clock::time_point end;
        for (int tries = 0; theirs.load(std::memory_order_acquire) < num_meetings_; ++tries) {
            if (tries < SPINS) {
#if defined(__x86_64__)
                _mm_pause();
#endif
            } else if (tries < SPINS + YIELDS) {
                std::this_thread::yield();
                end = std::chrono::steady_clock::now() + std::chrono::microseconds(int64_t(shape_.timeout_s * 1e6));
            } else {
                if (is_aborted.load() || std::chrono::steady_clock::now() > end) return false;
                tries = SPINS + YIELDS;
                std::this_thread::sleep_for(std::chrono::microseconds(50));
            }
        }
        return true;
    }

    Line& line(int64_t rank) const { return static_cast<Line*>(shape_.memory)[rank]; }
    float* place(int64_t rank, uint64_t meeting) const {
        float* const all = reinterpret_cast<float*>(static_cast<Line*>(shape_.memory) + shape_.size);
        return all + (meeting % 2 * shape_.size + rank) * shape_.capacity;
    }

    const RanksShape shape_;
    uint64_t num_meetings_ = 0;
    int64_t missing_ = -1;
};

}  // namespace carousel
