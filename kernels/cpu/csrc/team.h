// The threads of one call: torch's own OpenMP team, work handed out piece by piece.
//
// Pieces are taken from a counter, so that a thread that the machine slows down takes fewer of
// them. Which thread computes a piece never decides its bits.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>

namespace agentserve {

class Team {
public:
    // Shared by all threads of a call. Stages use the counters in turn.
    struct Shared {
        struct alignas(64) Counter {
            std::atomic<int64_t> next{0};
        };
        Counter counters[3];
    };

    Team(Shared& shared, int thread, int threads) : shared_(shared), thread_(thread), threads_(threads) {}

    int thread() const { return thread_; }

    // Run `body(i)` once for each i < count, `grain` neighbours at a time, then wait for the others.
    template <class Body> void each(int64_t count, int64_t grain, const Body& body) {
        if (threads_ == 1) {
            for (int64_t i = 0; i < count; ++i) body(i);
            return;
        }
        auto& counter = shared_.counters[stage_ % 3].next;
        // The counter after next was last used two barriers ago: nobody looks at it any more.
        if (thread_ == 0) shared_.counters[(stage_ + 1) % 3].next.store(0, std::memory_order_relaxed);
        ++stage_;
        for (;;) {
            const int64_t begin = counter.fetch_add(grain, std::memory_order_relaxed);
            if (begin >= count) break;
            const int64_t end = begin + grain < count ? begin + grain : count;
            for (int64_t i = begin; i < end; ++i) body(i);
        }
#pragma omp barrier
    }

private:
    Shared& shared_;
    int thread_, threads_;
    int stage_ = 0;
};

// Run `body(Team&)` in every thread of a team.
template <class Body> void with_team(int threads, const Body& body) {
    Team::Shared shared;
    if (threads <= 1) {
        Team team(shared, 0, 1);
        body(team);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        Team team(shared, omp_get_thread_num(), omp_get_num_threads());
        body(team);
    }
}

}  // namespace agentserve
