// Threads that compute a step together. Each phase is a loop that they share, and ends when all of its work is done.
// Within a step, no member waits for another one that merely lacks a CPU, because other processes use the same cores.
//
// OpenMP is not used, because its threads wait in busy loops: two processes with as many threads as cores slow each
// other down a hundredfold. These threads spin for some microseconds and then yield.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "amx.h"
#ifdef __linux__
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace carousel {

class ThreadPool {
  public:
    explicit ThreadPool(int size)
        : size_(size), members_(size), runs_{std::vector<Run>(size * MAX_LOOPS), std::vector<Run>(size * MAX_LOOPS)} {
        amx::refusal();  // asks for permission, which threads that start later inherit
        const std::vector<int> cpus = allowed_cpus();
        for (int member = 1; member < size; ++member)
            threads_.emplace_back([this, cpus, member] {
                if (int(cpus.size()) == size_) pin_to(cpus[member]);
                member_ = member;
                serve();
            });
    }

    ~ThreadPool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            ends_ = true;
            ++round_;
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    int size() const { return size_; }

    // Runs `work` once on every member, including the caller. Blocks until all have finished.
    void run(const std::function<void()>& work) {
        work_ = &work;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            round_.fetch_add(1, std::memory_order_release);
        }
        if (num_asleep_.load() > 0) wake_.notify_all();
        compute(work);
    }

    // Calls body(index) once for each index below count, on any free member, and blocks until all calls have returned.
    // Only valid inside `run`. Every member must call this with the same count.
    template <typename Body>
    void share(int64_t count, Body&& body) {
        Run* runs = next_loop();
        take(runs[0], {0, count}, body);
        wait_until([&] { return runs[0].num_done.load(std::memory_order_acquire) == count; });
    }

    struct Part {
        int64_t first, end;
    };

    // Like `share`, but each member starts with a run of adjacent indices, so that it benefits from its own prefetches.
    // A member that has finished its run helps with the rest of others' runs.
    template <typename Body>
    void share_runs(int64_t count, Body&& body) {
        Run* runs = next_loop();
        for (int step = 0; step < size_; ++step) {
            const int owner = (member_ + step) % size_;
            take(runs[owner], run_of(owner, count), body);
        }
        wait_until([&] {
            int64_t num_done = 0;
            for (int owner = 0; owner < size_; ++owner) num_done += runs[owner].num_done.load(std::memory_order_acquire);
            return num_done == count;
        });
    }

    // Blocks until all members have called this, inside `run`. Call before data that is read outside of loops changes.
    void meet() {
        if (size_ == 1) return;
        const uint32_t turn = turn_.load(std::memory_order_relaxed);
        if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            num_arrived_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            return;
        }
        wait_until([&] { return turn_.load(std::memory_order_acquire) != turn; });
    }

    // Returns the run with which this member starts in a loop of `count` indices.
    Part own_run(int64_t count) const { return run_of(member_, count); }

    // Makes this member prefetch some memory into its cache whenever it waits for others.
    void fetch_in_pauses(const void* from, int64_t num_bytes) {
        members_[member_].fetched = static_cast<const char*>(from);
        members_[member_].fetch_end = members_[member_].fetched + num_bytes;
    }

  private:
    // The state of a member's run in a loop.
    struct alignas(64) Run {
        std::atomic<int64_t> next{0}, num_done{0};
    };

    // Data that only the member itself uses.
    struct alignas(64) Member {
        int num_loops = 0;  // loops begun since `begin_loops`
        bool is_odd = false;
        const char *fetched = nullptr, *fetch_end = nullptr;
    };

    void compute(const std::function<void()>& work) {
        begin_loops();
        work();
        amx::release();
        meet();
    }

    // Switches to the other half of the records and clears the last one, because all members have met since its use.
    void begin_loops() {
        Member& own = members_[member_];
        own.is_odd = !own.is_odd;
        for (int loop = 0; loop < own.num_loops; ++loop) {
            Run& used = runs_[!own.is_odd][loop * size_ + member_];
            used.next.store(0, std::memory_order_relaxed);
            used.num_done.store(0, std::memory_order_relaxed);
        }
        own.num_loops = 0;
    }

    // Returns the next loop's records, one for each member.
    Run* next_loop() {
        Member& own = members_[member_];
        if (own.num_loops == MAX_LOOPS) meet(), begin_loops();
        return &runs_[own.is_odd][own.num_loops++ * size_];
    }

    // Calls body for the remaining indices of a run.
    template <typename Body>
    void take(Run& run, Part part, Body&& body) {
        int64_t num_done = 0;
        for (;;) {
            const int64_t index = part.first + run.next.fetch_add(1, std::memory_order_relaxed);
            if (index >= part.end) break;
            body(index);
            ++num_done;
        }
        if (num_done) run.num_done.fetch_add(num_done, std::memory_order_release);
    }

    Part run_of(int64_t member, int64_t count) const {
        return {count * member / size_, count * (member + 1) / size_};
    }

    template <typename Condition>
    void wait_until(Condition&& is_met) {
        Member& own = members_[member_];
        for (int tries = 0; !is_met();) {
            if (own.fetched < own.fetch_end)
                __builtin_prefetch(own.fetched), own.fetched += 64;
            else
                pause(tries++);
        }
    }

    void serve() {
        for (uint32_t seen = 0;;) {
            for (int tries = 0; round_.load(std::memory_order_acquire) == seen; ++tries) {
                if (tries < SPINS) {
                    pause(tries);
                    continue;
                }
                std::unique_lock<std::mutex> lock(mutex_);
                ++num_asleep_;
                wake_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != seen; });
                --num_asleep_;
            }
            ++seen;
            if (ends_) return;
            compute(*work_);
        }
    }

    // Returns the CPUs to pin threads to. A pool with a thread for every CPU is pinned, because the kernel sometimes
    // puts two threads on one CPU while others wait. A smaller pool is not, because other pools would use the same CPUs.
    static std::vector<int> allowed_cpus() {
        std::vector<int> cpus;
#ifdef __linux__
        cpu_set_t set;
        if (sched_getaffinity(0, sizeof(set), &set) == 0)
            for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
                if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
#endif
        return cpus;
    }

    static void pin_to([[maybe_unused]] int cpu) {
#ifdef __linux__
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpu, &set);
        sched_setaffinity(0, sizeof(set), &set);
#endif
    }

    static void pause(int tries) {
        if (tries >= SPINS) return std::this_thread::yield();
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    static constexpr int SPINS = 4000;  // some tens of microseconds
    static constexpr int MAX_LOOPS = 1024;  // more than most steps need; members meet after this number

    static inline thread_local int member_ = 0;  // 0 is the caller of `run`

    const int size_;
    std::vector<Member> members_;
    std::vector<Run> runs_[2];  // [loop][member], alternately for this `run` and the last one
    std::vector<std::thread> threads_;
    const std::function<void()>* work_ = nullptr;
    std::mutex mutex_;
    std::condition_variable wake_;
    bool ends_ = false;
    std::atomic<int> num_asleep_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<uint32_t> turn_{0};
    alignas(64) std::atomic<int> num_arrived_{0};
};

// A thread's part of a loop. Replaces a pool as an argument if the caller has already divided the loop.
struct LoopPart {
    int64_t index, num_parts;

    template <typename Body>
    void share(int64_t count, Body&& body) const {
        for (int64_t at = count * index / num_parts; at < count * (index + 1) / num_parts; ++at) body(at);
    }
    template <typename Body>
    void share_runs(int64_t count, Body&& body) const {
        share(count, body);
    }
};

}  // namespace carousel
