// The greatest number of each row, and whether all are finite: found while a product stores them.
#pragma once

#include <limits>

#include "gemm.h"

namespace agentserve {

constexpr int32_t LAST = std::numeric_limits<int32_t>::max();

// Of one row, what one thread has seen of it, lane by lane: the greatest number, the first output of
// the lowest panel that had it (as its distance from LAST), the largest magnitude. Panels come in any
// order: a thread that has done its own goes on with what others have left.
struct Seen {
    vf top = set1(-std::numeric_limits<float>::infinity());
    vi early = set1_lanes(0), largest = set1_lanes(0);

    INLINE void add(const float* x, int32_t first) {
        vf most = load(x);
        vi large = magnitude(most);
        UNROLL for (int c = W; c < PANEL; c += W) {
            const vf more = load(x + c);
            most = max(most, more);
            large = max_bits(large, magnitude(more));
        }
        const vi here = set1_lanes(static_cast<uint32_t>(LAST - first));
        early = where_greater(most, top, here, where_greater(top, most, early, max_bits(early, here)));
        top = max(most, top);
        largest = max_bits(largest, large);
    }
};

class GreatestOfRows {
public:
    GreatestOfRows(int rows, int threads) : rows_(rows), seen_(static_cast<size_t>(rows) * static_cast<size_t>(threads)) {}

    Seen* of_thread(int thread) { return seen_.data() + static_cast<int64_t>(thread) * rows_; }

    // The lowest place among the greatest of a row of finite numbers `x`, all of which were seen; -1 for another row.
    int64_t place(int row, const float* x) const {
        float top = -std::numeric_limits<float>::infinity();
        vi largest = set1_lanes(0);
        for (size_t i = static_cast<size_t>(row); i < seen_.size(); i += static_cast<size_t>(rows_)) {
            top = std::max(top, max_lanes(seen_[i].top));
            largest = max_bits(largest, seen_[i].largest);
        }
        if (!std::isfinite(max_bits_of(largest))) return -1;
        int64_t found = std::numeric_limits<int64_t>::max();
        for (size_t i = static_cast<size_t>(row); i < seen_.size(); i += static_cast<size_t>(rows_)) {
            float tops[W];
            int32_t early[W];
            store(tops, seen_[i].top);
            store_ints(early, seen_[i].early);
            for (int lane = 0; lane < W; ++lane)
                if (tops[lane] == top) found = std::min<int64_t>(found, LAST - early[lane]);
        }
        while (x[found] != top) ++found;
        return found;
    }

private:
    const int rows_;
    std::vector<Seen> seen_;
};

// Stores totals as `StoreFloat` does, and shows them to this thread's `seen`, one for each row.
struct StoreSeen {
    StoreFloat store;
    Seen* seen;
    void operator()(int first, int rows, const Panel& panel, const float (*total)[PANEL]) const {
        store(first, rows, panel, total);
        for (int r = 0; r < rows; ++r) {
            if (panel.width == PANEL) {
                seen[first + r].add(total[r], panel.first);
                continue;
            }
            float row[PANEL];  // columns that hold no output: the first once more
            for (int c = 0; c < PANEL; ++c) row[c] = total[r][c < panel.width ? c : 0];
            seen[first + r].add(row, panel.first);
        }
    }
};

}  // namespace agentserve
