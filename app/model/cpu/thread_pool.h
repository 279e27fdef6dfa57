// Threads that compute one step together. Each phase is a loop that they share, and ends when all of its work is done.
// Within a step, no member waits for a member that only lacks a CPU at the moment: other processes use the same cores.
//
// OpenMP is not used: its threads wait in busy loops, and two processes with as many threads as cores then slow each
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
        amx::refusal();  // asks for permission, which also covers threads that start later
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

    // Runs `work` once on every member, including the caller. Returns when all are done.
    void run(const std::function<void()>& work) {
        work_ = &work;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            round_.fetch_add(1, std::memory_order_release);
        }
        if (num_asleep_.load() > 0) wake_.notify_all();
        compute(work);
    }

    // Inside `run`: calls body(index) once for each index below count, on any free member. Returns when all calls are
    // done. Every member must call this with the same count.
    template <typename Body>
    void share(int64_t count, Body&& body) {
        Run* runs = next_loop();
        take(runs[0], {0, count}, body);
        wait_until([&] { return runs[0].num_done.load(std::memory_order_acquire) == count; });
    }

    struct Part {
        int64_t first, end;
    };

    // Like `share`, with a run of adjacent indices for each member, so that its prefetches serve the member itself. A
    // member that has done its run takes the rest of other members' runs.
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

    // Inside `run`: returns when all members are here. Data that members read outside of loops may change only then.
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

    // The first run of this member in a loop of `count` indices.
    Part own_run(int64_t count) const { return run_of(member_, count); }

    // From now on, this member prefetches this memory into its cache while it waits for the others.
    void fetch_in_pauses(const void* from, int64_t num_bytes) {
        members_[member_].fetched = static_cast<const char*>(from);
        members_[member_].fetch_end = members_[member_].fetched + num_bytes;
    }

  private:
    // The state of one member's indices in one loop.
    struct alignas(64) Run {
        std::atomic<int64_t> next{0}, num_done{0};
    };

    // Data that no other member reads.
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

    // Switches to the other half of the records, and clears the half used last: all members have met since then.
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

    // Returns the records of the next loop, one for each member.
    Run* next_loop() {
        Member& own = members_[member_];
        if (own.num_loops == MAX_LOOPS) meet(), begin_loops();
        return &runs_[own.is_odd][own.num_loops++ * size_];
    }

    // Calls body for the rest of a run.
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

    // A pool with a thread for every CPU of this process is pinned: otherwise the kernel sometimes puts two threads on
    // one CPU, and the others wait. A smaller pool is not pinned: other pools on this machine would use the same CPUs.
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

    static constexpr int SPINS = 4000;  // takes some tens of microseconds
    static constexpr int MAX_LOOPS = 1024;  // more than most steps have; the members meet after this many

    static inline thread_local int member_ = 0;  // 0 is the caller of `run`

    const int size_;
    std::vector<Member> members_;
    std::vector<Run> runs_[2];  // of the loops of this run and of the last one, alternating: [loop][member]
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

// One of several parts of a loop, for one thread: the caller can divide a loop with this instead of a pool.
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
