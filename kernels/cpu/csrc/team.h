// The threads of one call: torch's own OpenMP team, work handed out piece by piece.
//
// A call is a sequence of stages, the same in every thread. A stage is over when its pieces are
// done, not when every thread has been there: a thread that the machine keeps waiting holds up
// nobody, unless in the middle of a piece; it passes over the stages that others have finished.
// Which thread computes a piece never decides its bits.
//
// A stage can have parts: a thread keeps to its own while that lasts, so that it reads one long run
// of memory, which the machine fetches ahead by itself.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace agentserve {

constexpr int PIECES_PER_THREAD = 8;  // so many let threads end a stage at about the same time

struct Nothing {
    void operator()() const {}
};

constexpr int MOST_PARTS = 8;  // of a stage

struct alignas(64) Stage {
    std::atomic<int64_t> next[MOST_PARTS]{}, done{0};
    std::atomic<uint32_t> finished{0};
};

class Team {
public:
    Team(std::vector<Stage>& stages, int thread, int threads) : stages_(stages), thread_(thread), threads_(threads), alone_(threads == 1) {}

    int thread() const { return thread_; }
    int threads() const { return threads_; }

    // Run `body(i)` once for each i < count, `grain` neighbours at a time, and `last()` once after
    // all of them; returns when that is done.
    template <class Body, class Last = Nothing>
    void each(int64_t count, int64_t grain, const Body& body, const Last& last = {}) {
        if (alone_) {
            for (int64_t i = 0; i < count; ++i) body(i);
            last();
            return;
        }
        Stage& stage = stages_[at_++];
        const int64_t pieces = (count + grain - 1) / grain;
        for (;;) {
            const int64_t piece = stage.next[0].fetch_add(1, std::memory_order_relaxed);
            if (piece >= pieces) break;
            const int64_t end = (piece + 1) * grain < count ? (piece + 1) * grain : count;
            for (int64_t i = piece * grain; i < end; ++i) body(i);
            if (finish(stage, pieces, last)) return;
        }
        if (pieces > 0) wait(stage);
    }

    // As `each` with single pieces, in at most `parts` parts; `body(i, next)` also hears which piece the
    // thread will get next (`count`: none), so that it can fetch it ahead.
    template <class Body, class Last = Nothing>
    void each_ahead(int64_t count, int parts, const Body& body, const Last& last = {}) {
        if (alone_) {
            for (int64_t i = 0; i < count; ++i) body(i, i + 1);
            last();
            return;
        }
        Stage& stage = stages_[at_++];
        parts = std::min(parts, threads_);
        Taker taker{stage, count, parts, thread_ * parts / threads_};
        int64_t i = taker.take();
        while (i < count) {
            const int64_t next = taker.take();
            body(i, next);
            if (finish(stage, count, last)) return;
            i = next;
        }
        if (count > 0) wait(stage);
    }

private:
    // Takes pieces out of one thread's own part of a stage, then out of what others have left.
    struct Taker {
        Stage& stage;
        const int64_t count;
        const int parts;
        int part;
        int left = parts;  // parts that may still have some

        int64_t take() {
            for (; left > 0; --left, part = (part + 1) % parts) {
                const int64_t i = count * part / parts + stage.next[part].fetch_add(1, std::memory_order_relaxed);
                if (i < count * (part + 1) / parts) return i;
            }
            return count;
        }
    };

    static constexpr int SPINS = 4000;  // some tens of microseconds, then sleep

    // Count a piece as done. The thread that does the last one ends the stage.
    template <class Last> static bool finish(Stage& stage, int64_t pieces, const Last& last) {
        if (stage.done.fetch_add(1, std::memory_order_acq_rel) + 1 != pieces) return false;
        last();
        stage.finished.store(1, std::memory_order_release);
        stage.finished.notify_all();
        return true;
    }

    static void wait(Stage& stage) {
        for (int i = 0; i < SPINS; ++i) {
            if (stage.finished.load(std::memory_order_acquire)) return;
#if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
#endif
        }
        stage.finished.wait(0, std::memory_order_acquire);
    }

    std::vector<Stage>& stages_;
    const int thread_, threads_;
    const bool alone_;
    size_t at_ = 0;
};

// Run `body(Team&)` in every thread of a team, with room for `stages` stages.
template <class Body> void with_team(int threads, int stages, const Body& body) {
    std::vector<Stage> room(threads > 1 ? static_cast<size_t>(stages) : 0);
    if (threads <= 1) {
        Team team(room, 0, 1);
        body(team);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        Team team(room, omp_get_thread_num(), threads);
        body(team);
    }
}

}  // namespace agentserve
