// How one step's attention is cut into tasks. Nothing here decides bits: keys are walked in tiles
// and segments at absolute positions, whichever task walks them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

namespace agentserve {

constexpr int TILE = 256;             // keys between two looks at the running maximum
constexpr int SEGMENT = 2 * TILE;     // keys whose part is kept apart and merged in order
constexpr int TASK_QUERIES = 96;      // queries (tokens x heads of a group) of a task, at most (1 token: its group)
constexpr int64_t SPLIT_TOKENS = 16;  // blocks of so few tokens give their segments to different threads

constexpr int64_t FEW = 4;            // so few small pieces are not worth a stage: one thread does them

struct Span {
    int64_t row, rows, position;
};

// A query token of a task. Segment s of it goes to partial `partial + s`.
struct QueryRow {
    int32_t row, position;
    int64_t partial;
};

struct Task {
    int32_t first, tokens;  // in Plan::queries
    const int64_t* table;
    int64_t begin, end;  // keys that some row of it sees
    int64_t segment, segments;
    bool direct;  // all segments of its rows are here: the result goes straight out
};

struct Merge {
    int32_t row;
    int64_t partial, count;
};

struct Plan {
    int window, group, slots;
    std::vector<int64_t> tables;
    std::vector<QueryRow> queries;
    std::vector<Task> tasks;
    std::vector<Merge> merges;
    int64_t partials = 0;
    int32_t largest = 0;      // tokens of the largest task
    int64_t shared_keys = 0;  // keys read once for several rows, counted for each row but the first

    Plan(const Span* spans, int64_t count, const int64_t* pages, int64_t columns, int window, int group, int slots)
        : window(window), group(group), slots(slots), tables(pages, pages + count * columns) {
        const int64_t block = std::max(1, TASK_QUERIES / group);
        for (int64_t i = 0; i < count; ++i) {
            const Span& span = spans[i];
            for (int64_t at = 0; at < span.rows; at += block)
                add_block(span, at, std::min(block, span.rows - at), tables.data() + i * columns);
        }
        flatten();
    }

private:
    struct Pending {
        Task task;
        std::vector<QueryRow> queries;
    };
    std::vector<Pending> pending_;
    std::unordered_map<int64_t, std::vector<size_t>> shareable_;  // by first page of a whole segment

    void add_block(const Span& span, int64_t at, int64_t tokens, const int64_t* table) {
        const int64_t oldest = span.position + at, end = oldest + tokens;
        const int64_t begin = window > 0 ? std::max<int64_t>(0, oldest - window + 1) : 0;
        const int64_t first = begin / SEGMENT, last = (end - 1) / SEGMENT, segments = last - first + 1;
        const bool direct = tokens > SPLIT_TOKENS || segments == 1;
        std::vector<QueryRow> queries;
        for (int64_t t = 0; t < tokens; ++t) {
            const auto row = static_cast<int32_t>(span.row + at + t);
            queries.push_back({row, static_cast<int32_t>(oldest + t), partials - first});
            if (direct) continue;
            merges.push_back({row, partials, segments});
            partials += segments;
        }
        if (direct) {
            pending_.push_back({{0, 0, table, begin, end, first, segments, true}, std::move(queries)});
            return;
        }
        for (int64_t s = first; s <= last; ++s) {
            const bool whole = window <= 0 && tokens == 1 && SEGMENT % slots == 0 && (s + 1) * SEGMENT <= end;
            if (whole && join(table, s, queries[0])) continue;
            pending_.push_back({{0, 0, table, begin, end, s, 1, false}, queries});
            if (whole) {
                pending_.back().task.begin = s * SEGMENT;
                pending_.back().task.end = (s + 1) * SEGMENT;
                shareable_[table[s * SEGMENT / slots]].push_back(pending_.size() - 1);
            }
        }
    }

    // Let a row read a segment together with a row that has the same pages there.
    bool join(const int64_t* table, int64_t segment, const QueryRow& query) {
        const int64_t from = segment * SEGMENT / slots, pages = SEGMENT / slots;
        const auto found = shareable_.find(table[from]);
        if (found == shareable_.end()) return false;
        for (const size_t number : found->second) {
            Pending& other = pending_[number];
            const bool room = static_cast<int64_t>(other.queries.size() + 1) * group <= TASK_QUERIES;
            if (!room || other.task.segment != segment) continue;
            if (std::memcmp(other.task.table + from, table + from, static_cast<size_t>(pages) * sizeof *table)) continue;
            other.queries.push_back(query);
            shared_keys += SEGMENT;
            return true;
        }
        return false;
    }

    // Longest tasks first, so that no thread ends up alone with one.
    void flatten() {
        const auto work = [](const Pending& p) {
            return static_cast<int64_t>(p.queries.size()) * std::min(p.task.end, p.task.segments * SEGMENT);
        };
        std::stable_sort(pending_.begin(), pending_.end(), [&](const Pending& a, const Pending& b) { return work(a) > work(b); });
        for (Pending& p : pending_) {
            p.task.first = static_cast<int32_t>(queries.size());
            p.task.tokens = static_cast<int32_t>(p.queries.size());
            largest = std::max(largest, p.task.tokens);
            queries.insert(queries.end(), p.queries.begin(), p.queries.end());
            tasks.push_back(p.task);
        }
        pending_.clear();
        shareable_.clear();
    }
};

}  // namespace agentserve
