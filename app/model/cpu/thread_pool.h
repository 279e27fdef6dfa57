// Threads that compute one step together: each phase is a loop that they share, with a barrier at its end.
//
// Not OpenMP: its threads wait in busy loops, and two processes with as many threads as cores then slow each other down
// a hundredfold. These threads spin for some microseconds and then yield.
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
    explicit ThreadPool(int size) : size_(size), runs_(size) {
        amx::refusal();  // asks for permission, which holds for threads that begin later
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

    // Runs `work` once on every member, the caller included; returns when all are done.
    void run(const std::function<void()>& work) {
        work_ = &work;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            round_.fetch_add(1, std::memory_order_release);
        }
        if (num_asleep_.load() > 0) wake_.notify_all();
        work();
        amx::release();
        barrier();
    }

    // Inside `run`: calls body(index) for each index below count, once, on whichever member is free; then a barrier.
    template <typename Body>
    void share(int64_t count, Body&& body) {
        for (;;) {
            const int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
            if (index >= count) break;
            body(index);
        }
        barrier();
    }

    struct Part {
        int64_t first, end;
    };

    // The same, with a run of neighbouring indices for each member, so that what it fetches ahead is its own. A member that
    // has done its run takes what is left of the others'.
    template <typename Body>
    void share_runs(int64_t count, Body&& body) {
        const int now = runs_[member_].num_loops++ % 2;
        runs_[member_].next[1 - now].store(0, std::memory_order_relaxed);  // of the next loop; the barrier publishes it
        for (int step = 0; step < size_; ++step) {
            const int owner = (member_ + step) % size_;
            const Part run = run_of(owner, count);
            for (;;) {
                const int64_t index = run.first + runs_[owner].next[now].fetch_add(1, std::memory_order_relaxed);
                if (index >= run.end) break;
                body(index);
            }
        }
        barrier();
    }

    // The run with which this member begins when it shares so many.
    Part own_run(int64_t count) const { return run_of(member_, count); }

    // From now on, this member fetches some memory into its cache while it waits for the others.
    void fetch_in_pauses(const void* from, int64_t num_bytes) {
        runs_[member_].fetched = static_cast<const char*>(from);
        runs_[member_].fetch_end = runs_[member_].fetched + num_bytes;
    }

  private:
    struct alignas(64) Run {
        std::atomic<int64_t> next[2] = {};  // of its member's run, for every other loop
        uint32_t num_loops = 0;             // the rest is the member's own
        const char *fetched = nullptr, *fetch_end = nullptr;
    };

    Part run_of(int64_t member, int64_t count) const {
        return {count * member / size_, count * (member + 1) / size_};
    }

    void barrier() {
        if (size_ == 1) {
            next_.store(0, std::memory_order_relaxed);
            return;
        }
        const uint32_t turn = turn_.load(std::memory_order_relaxed);
        if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            num_arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            return;
        }
        Run& own = runs_[member_];
        for (int tries = 0; turn_.load(std::memory_order_acquire) == turn;) {
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
            (*work_)();
            amx::release();
            barrier();
        }
    }

    // A pool with a thread for every CPU of this process is pinned: otherwise the kernel puts two threads on one CPU
    // now and then, and the others wait. A smaller pool is not: other pools on this machine would use the same CPUs.
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

    static inline thread_local int member_ = 0;  // the caller of `run` is the first

    const int size_;
    std::vector<Run> runs_;
    std::vector<std::thread> threads_;
    const std::function<void()>* work_ = nullptr;
    std::mutex mutex_;
    std::condition_variable wake_;
    bool ends_ = false;
    std::atomic<int> num_asleep_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<uint32_t> turn_{0};
    alignas(64) std::atomic<int> num_arrived_{0};
    alignas(64) std::atomic<int64_t> next_{0};
};

// One of several parts of a loop, for one thread: loops that a pool shares can be divided by the caller instead.
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
