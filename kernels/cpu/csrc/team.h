// The threads of one call: torch's own OpenMP team, work handed out piece by piece.
//
// Pieces are taken from a counter, so that a thread that the machine slows down takes fewer of
// them. Which thread computes a piece never decides its bits.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace agentserve {

// Where the threads of a team wait for each other. Spins briefly, then sleeps: OpenMP's own barrier
// spins for milliseconds, which two threads on one core spend waiting for each other.
class Barrier {
public:
    explicit Barrier(int threads) : threads_(threads) {}

    // The last to arrive runs `last` before anyone goes on.
    template <class Last> void wait(const Last& last) {
        const uint32_t round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            last();
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            round_.notify_all();
            return;
        }
        for (int i = 0; i < SPINS; ++i) {
            if (round_.load(std::memory_order_acquire) != round) return;
            relax();
        }
        round_.wait(round, std::memory_order_acquire);
    }

private:
    static constexpr int SPINS = 4000;  // some tens of microseconds

    static void relax() {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
    }

    const int threads_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

struct Nothing {
    void operator()() const {}
};

class Team {
public:
    // Shared by all threads of a call. Stages use the counters in turn.
    struct Shared {
        struct alignas(64) Counter {
            std::atomic<int64_t> next{0};
        };
        Counter counters[3];
        Barrier barrier;
        explicit Shared(int threads) : barrier(threads) {}
    };

    Team(Shared& shared, int thread, int threads) : shared_(shared), thread_(thread), threads_(threads) {}

    int thread() const { return thread_; }

    // Run `body(i)` once for each i < count, `grain` neighbours at a time, then wait for the others;
    // one thread runs `last` after all of them.
    template <class Body, class Last = Nothing>
    void each(int64_t count, int64_t grain, const Body& body, const Last& last = {}) {
        if (threads_ == 1) {
            for (int64_t i = 0; i < count; ++i) body(i);
            last();
            return;
        }
        auto& counter = begin_stage();
        for (;;) {
            const int64_t begin = counter.fetch_add(grain, std::memory_order_relaxed);
            if (begin >= count) break;
            const int64_t end = begin + grain < count ? begin + grain : count;
            for (int64_t i = begin; i < end; ++i) body(i);
        }
        shared_.barrier.wait(last);
    }

    // As `each` with single pieces; `body(i, next)` also hears which piece the thread will get next
    // (`count` or more: none), so that it can fetch it ahead.
    template <class Body, class Last = Nothing>
    void each_ahead(int64_t count, const Body& body, const Last& last = {}) {
        if (threads_ == 1) {
            for (int64_t i = 0; i < count; ++i) body(i, i + 1);
            last();
            return;
        }
        auto& counter = begin_stage();
        int64_t i = counter.fetch_add(1, std::memory_order_relaxed);
        while (i < count) {
            const int64_t next = counter.fetch_add(1, std::memory_order_relaxed);
            body(i, next);
            i = next;
        }
        shared_.barrier.wait(last);
    }

private:
    std::atomic<int64_t>& begin_stage() {
        auto& counter = shared_.counters[stage_ % 3].next;
        // The counter after next was last used two barriers ago: nobody looks at it any more.
        if (thread_ == 0) shared_.counters[(stage_ + 1) % 3].next.store(0, std::memory_order_relaxed);
        ++stage_;
        return counter;
    }

    Shared& shared_;
    int thread_, threads_;
    int stage_ = 0;
};

// Run `body(Team&)` in every thread of a team.
template <class Body> void with_team(int threads, const Body& body) {
    if (threads <= 1) {
        Team::Shared shared(1);
        Team team(shared, 0, 1);
        body(team);
        return;
    }
    std::unique_ptr<Team::Shared> shared;
#pragma omp parallel num_threads(threads)
    {
        // OpenMP may give fewer threads than asked for.
#pragma omp single
        shared = std::make_unique<Team::Shared>(omp_get_num_threads());
        Team team(*shared, omp_get_thread_num(), omp_get_num_threads());
        body(team);
    }
}

}  // namespace agentserve
