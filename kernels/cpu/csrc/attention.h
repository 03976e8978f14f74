// Paged causal attention: streaming softmax over absolute tiles and segments of keys.
//
// For one query: within a segment the running maximum, sum and output follow each other tile by
// tile; segments start afresh and are merged in order. A tile or segment in which a query sees
// nothing changes nothing (weights are exactly 0, scales exactly 1). So a query's bits depend on
// its own keys alone, whatever block, task or step it comes in.
#pragma once

#include <cmath>
#include <limits>

#include "attention_blocks.h"
#include "pages.h"
#include "team.h"

namespace agentserve {

constexpr float FLOOR = -1e30f;  // stands for minus infinity where a difference of two is taken
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// One thread's room for one task.
template <class T> struct AttentionScratch {
    std::vector<typename T::Stored> queries, weights, keys, values;
    std::vector<float> scores, out, total_out, top, new_top, sum, fade, total_top, total_sum;

    // `wide`: head dimension filled up to whole key blocks.
    void fit(int rows, int dim, int wide) {
        const auto grow = [](auto& v, size_t n) { if (v.size() < n) v.resize(n); };
        const size_t r = static_cast<size_t>(rows), d = static_cast<size_t>(wide);
        grow(queries, r * static_cast<size_t>(dim));
        grow(weights, r * TILE);
        grow(keys, static_cast<size_t>(TILE) * static_cast<size_t>(dim));
        grow(values, static_cast<size_t>(TILE) * d);
        grow(scores, r * TILE);
        grow(out, r * d);
        grow(total_out, r * d);
        grow(sum, r * W);
        for (auto* v : {&top, &new_top, &fade, &total_top, &total_sum}) grow(*v, r + W);
    }
};

// Adds a segment's (top, sum, out) to a row's running total.
INLINE void merge_segment(float top, float sum, const float* out, float& total_top, float& total_sum, float* total_out, int dim) {
    const float new_top = total_top > top ? total_top : top;
    const float old_scale = exp2_one(total_top - new_top), scale = exp2_one(top - new_top);
    total_top = new_top;
    total_sum = std::fma(sum, scale, total_sum * old_scale);
    for (int d = 0; d < dim; d += W)
        store(total_out + d, fma(load(out + d), set1(scale), mul(load(total_out + d), set1(old_scale))));
}

template <class T> INLINE void write_output(const float* out, float sum, int dim, typename T::Stored* to) {
    int d = 0;
    for (; d + W <= dim; d += W) T::store_round(to + d, div(load(out + d), set1(sum)));
    for (; d < dim; ++d) to[d] = T::round(out[d] / sum);
}

// One KV group's attention for one layer.
template <class T> class Attention {
public:
    using Stored = typename T::Stored;

    Attention(const Plan& plan, const Pages<T>& pages, int heads, const Stored* q, Stored* out, float* partials)
        : plan_(plan), pages_(pages), heads_(heads), q_(q), out_(out), partials_(partials),
          scale_(1.44269504089f / std::sqrt(static_cast<float>(pages.dim))), wide_(widened(pages.dim)),
          gathered_(pages.slots % KEY_BLOCK != 0 || pages.dim != wide_) {}

    static constexpr int STAGES = 2;  // tasks, merging

    static int widened(int dim) { return (dim + KEY_BLOCK - 1) / KEY_BLOCK * KEY_BLOCK; }
    static int64_t partial_floats(int heads, int dim) { return static_cast<int64_t>(heads) * (widened(dim) + W); }

    void run(Team& team, AttentionScratch<T>& scratch) const {
        const int kv_heads = pages_.kv_heads;
        const int64_t count = static_cast<int64_t>(plan_.tasks.size()) * kv_heads;
        const auto piece = [&](int64_t i) { return i < count ? Piece{&plan_.tasks[static_cast<size_t>(i / kv_heads)], static_cast<int>(i % kv_heads)} : Piece{}; };
        const auto merges = static_cast<int64_t>(plan_.merges.size());
        const auto one = [&](int64_t i) { merge(plan_.merges[static_cast<size_t>(i)], scratch); };
        const bool few = merges <= FEW;
        team.each_ahead(
            count, [&](int64_t i, int64_t next) { task(*piece(i).task, piece(i).kv_head, piece(next), scratch); },
            [&] {
                for (int64_t i = 0; few && i < merges; ++i) one(i);
            });
        if (!few) team.each(merges, 1, one);
    }

private:
    struct Piece {
        const Task* task = nullptr;
        int kv_head = 0;
    };

    const Plan& plan_;
    const Pages<T>& pages_;
    const int heads_;
    const Stored* q_;
    Stored* out_;
    float* partials_;
    const float scale_;
    const int wide_;
    const bool gathered_;  // pages that do not hold whole key blocks: copy keys and values together first

    float* partial(int64_t number, int head) const { return partials_ + number * partial_floats(heads_, pages_.dim) + head * (wide_ + W); }

    void task(const Task& task, int kv_head, const Piece& next, AttentionScratch<T>& s) const {
        const int group = plan_.group, dim = pages_.dim, rows = task.tokens * group;
        const QueryRow* queries = plan_.queries.data() + task.first;
        s.fit(rows, dim, wide_);
        for (int t = 0; t < task.tokens; ++t)
            std::memcpy(&s.queries[static_cast<size_t>(t) * group * dim],
                        q_ + (static_cast<int64_t>(queries[t].row) * heads_ + kv_head * group) * dim,
                        static_cast<size_t>(group) * dim * sizeof(Stored));
        if (task.direct) {
            std::fill_n(s.total_top.begin(), rows, FLOOR);
            std::fill_n(s.total_sum.begin(), rows, 0.0f);
            std::fill_n(s.total_out.begin(), static_cast<size_t>(rows) * wide_, 0.0f);
        }
        for (int64_t segment = task.segment; segment < task.segment + task.segments; ++segment) {
            walk(task, segment, kv_head, next, s);
            for (int r = 0; r < rows; ++r) {
                const float sum = sum_lanes(load(&s.sum[static_cast<size_t>(r) * W]));
                const float* out = &s.out[static_cast<size_t>(r) * wide_];
                if (task.direct) {
                    merge_segment(s.top[r], sum, out, s.total_top[r], s.total_sum[r], &s.total_out[static_cast<size_t>(r) * wide_], wide_);
                    continue;
                }
                float* to = partial(queries[r / group].partial + segment, kv_head * group + r % group);
                to[0] = s.top[r];
                to[1] = sum;
                std::memcpy(to + W, out, static_cast<size_t>(wide_) * sizeof *out);
            }
        }
        for (int r = 0; task.direct && r < rows; ++r)
            write_output<T>(&s.total_out[static_cast<size_t>(r) * wide_], s.total_sum[r], dim,
                            out_ + (static_cast<int64_t>(queries[r / group].row) * heads_ + kv_head * group + r % group) * dim);
    }

    // One segment of a task's keys, from nothing.
    void walk(const Task& task, int64_t segment, int kv_head, const Piece& next, AttentionScratch<T>& s) const {
        const int rows = task.tokens * plan_.group;
        std::fill_n(s.top.begin(), rows, FLOOR);
        std::fill_n(s.sum.begin(), static_cast<size_t>(rows) * W, 0.0f);
        std::fill_n(s.out.begin(), static_cast<size_t>(rows) * wide_, 0.0f);
        for (int64_t tile = segment * SEGMENT; tile < (segment + 1) * SEGMENT; tile += TILE) {
            const int64_t low = std::max(tile, task.begin), high = std::min(tile + TILE, task.end);
            if (low >= high) continue;
            const bool more = tile + TILE < std::min(task.end, (task.segment + task.segments) * SEGMENT);
            walk_tile(task, tile, low, high, kv_head, more ? keys_ahead(task, tile + TILE, kv_head) : first_keys(next), s);
        }
    }

    void walk_tile(const Task& task, int64_t tile, int64_t low, int64_t high, int kv_head, Ahead next_keys, AttentionScratch<T>& s) const {
        const int rows = task.tokens * plan_.group;
        const int first = static_cast<int>(low - tile) / KEY_BLOCK, end = (static_cast<int>(high - tile) + KEY_BLOCK - 1) / KEY_BLOCK;
        const uint32_t* keys[TILE / W];
        const uint32_t* values[TILE / KEY_BLOCK];
        for (int b = first; b < end; ++b) {
            const int64_t at = tile + b * KEY_BLOCK;
            const bool whole = low <= at && at + KEY_BLOCK <= high;
            find(task, b, at, kv_head, keys, values);
            if (gathered_ || !whole) gather(task, b, std::max(low, at), std::min(high, at + KEY_BLOCK), kv_head, s, keys, values);
        }
        score_tile(keys, values, first * KEY_BLOCK / W, end * KEY_BLOCK / W, rows, s);
        soften(task, tile, first * KEY_BLOCK, end * KEY_BLOCK, s);
        const auto* weights = reinterpret_cast<const uint32_t*>(s.weights.data()) + first * BLOCK_LANES<T>;
        for (int d = 0; d < wide_;) {
            int taken = 0;
            with_count<ATTENTION_VECTORS>((wide_ - d) / W, [&](auto v) {
                constexpr int V = decltype(v)::value;
                const uint32_t* part[TILE / KEY_BLOCK];
                for (int b = first; b < end; ++b) part[b - first] = values[b] + d;
                for (int r = 0; r < rows;)
                    with_count<ATTENTION_ROWS>(rows - r, [&](auto n) {
                        constexpr int R = decltype(n)::value;
                        next_keys.step = r == 0 ? static_cast<int64_t>(pages_.slots) * 4 * W / KEY_BLOCK : 0;
                        value_block<T, R, V>(weights + r * (TILE / T::PAIR), part, end - first, wide_, &s.fade[r], next_keys, d / W,
                                             &s.out[static_cast<size_t>(r) * wide_ + d]);
                        r += R;
                    });
                taken = V * W;
            });
            d += taken;
        }
    }

    // Key block b of a tile, at key `at`, as it lies in its page.
    void find(const Task& task, int b, int64_t at, int kv_head, const uint32_t** keys, const uint32_t** values) const {
        if (gathered_) return;
        const int64_t page = task.table[at / pages_.slots];
        const int inside = static_cast<int>(at % pages_.slots);
        const auto* k = reinterpret_cast<const uint32_t*>(pages_.keys(page, kv_head)) + inside;
        for (int v = 0; v < KEY_BLOCK / W; ++v) keys[b * (KEY_BLOCK / W) + v] = k + v * W;
        values[b] = reinterpret_cast<const uint32_t*>(pages_.values(page, kv_head)) + inside / T::PAIR * wide_;
    }

    // Copies of a key block's values (and, from pages that hold no whole blocks, its keys) with zeros
    // outside `low .. high`: slots that no row may see can hold anything, and 0 times NaN is NaN.
    void gather(const Task& task, int b, int64_t low, int64_t high, int kv_head, AttentionScratch<T>& s, const uint32_t** keys,
                const uint32_t** values) const {
        constexpr int P = T::PAIR;
        const int dim = pages_.dim, slots = pages_.slots;
        Stored* v = &s.values[static_cast<size_t>(b) * KEY_BLOCK * wide_];
        Stored* k = &s.keys[static_cast<size_t>(b) * KEY_BLOCK * dim];
        std::fill_n(v, KEY_BLOCK * wide_, Stored(0));
        if (gathered_) std::fill_n(k, KEY_BLOCK * dim, Stored(0));
        for (int64_t at = low; at < high; ++at) {
            const int64_t page = task.table[at / slots], i = at % KEY_BLOCK;
            const auto place = pages_.value_place(at % slots);
            const Stored* from = pages_.values(page, kv_head) + place.start;
            for (int d = 0; d < dim; ++d) v[(i / P * wide_ + d) * P + i % P] = from[d * place.step];
            if (!gathered_) continue;
            const Stored* key = pages_.keys(page, kv_head) + at % slots * P;
            for (int d = 0; d < dim; d += P) std::memcpy(k + d * KEY_BLOCK + i * P, key + d * slots, P * sizeof(Stored));
        }
        values[b] = reinterpret_cast<const uint32_t*>(v);
        for (int n = 0; gathered_ && n < KEY_BLOCK / W; ++n) keys[b * (KEY_BLOCK / W) + n] = reinterpret_cast<const uint32_t*>(k) + n * W;
    }

    // Where the keys of a tile begin, block by block; null where there are none.
    Ahead keys_ahead(const Task& task, int64_t tile, int kv_head) const {
        Ahead ahead{{}, 0};
        const int64_t low = std::max(tile, task.begin), high = std::min(tile + TILE, task.end);
        for (int b = 0; b < TILE / KEY_BLOCK; ++b) {
            const int64_t at = std::max(tile + b * KEY_BLOCK, low);
            if (at >= high || at >= tile + (b + 1) * KEY_BLOCK) continue;
            const auto* keys = pages_.keys(task.table[at / pages_.slots], kv_head);
            ahead.at[b] = reinterpret_cast<const char*>(keys) + at % pages_.slots * sizeof(uint32_t);
        }
        return ahead;
    }
    Ahead first_keys(const Piece& next) const {
        if (!next.task) return Ahead{{}, 0};
        const int64_t low = std::max(next.task->segment * SEGMENT, next.task->begin);
        return keys_ahead(*next.task, low / TILE * TILE, next.kv_head);
    }

    void score_tile(const uint32_t* const* keys, const uint32_t* const* values, int first, int end, int rows, AttentionScratch<T>& s) const {
        const int lanes = pages_.dim / T::PAIR;
        const auto* q = reinterpret_cast<const uint32_t*>(s.queries.data());
        Ahead ahead{{}, 0};
        for (int b = first * W / KEY_BLOCK; b < end * W / KEY_BLOCK; ++b) ahead.at[b] = reinterpret_cast<const char*>(values[b]);
        for (int v = first; v < end;) {
            int taken = 0;
            with_count<ATTENTION_VECTORS>(end - v, [&](auto count) {
                constexpr int V = decltype(count)::value;
                for (int r = 0; r < rows;)
                    with_count<ATTENTION_ROWS>(rows - r, [&](auto n) {
                        constexpr int R = decltype(n)::value;
                        ahead.step = r == 0 ? KEY_BLOCK * 4 : 0;
                        score_block<T, R, V>(q + static_cast<int64_t>(r) * lanes, lanes, keys + v, gathered_ ? KEY_BLOCK : pages_.slots, lanes, scale_, ahead, v,
                                             &s.scores[static_cast<size_t>(r) * TILE + v * W]);
                        r += R;
                    });
                taken = V;
            });
            v += taken;
        }
    }

    // The maximum with scores `first .. end` of a tile added; scores outside `low .. high` are hidden.
    static float raise(float* scores, float top, int first, int end, bool masked, int low, int high) {
        vf largest = set1(top);
        for (int k = first; k < end; k += W) {
            vf x = load(scores + k);
            if (masked) {
                const vi index = add_lanes(iota(), set1_lanes(static_cast<uint32_t>(k)));
                x = in_range(index, set1_lanes(static_cast<uint32_t>(low)), set1_lanes(static_cast<uint32_t>(high)), x, set1(NOTHING));
                store(scores + k, x);
            }
            largest = max(largest, x);
        }
        return max_lanes(largest);
    }

    // Scores of a tile's keys `first .. end` become weights against each row's new maximum.
    void soften(const Task& task, int64_t tile, int first, int end, AttentionScratch<T>& s) const {
        const QueryRow* queries = plan_.queries.data() + task.first;
        const int group = plan_.group, rows = task.tokens * group;
        for (int r = 0; r < rows; ++r) {
            const int64_t position = queries[r / group].position;
            const int64_t oldest = plan_.window > 0 ? position - plan_.window + 1 : 0;
            const bool masked = position + 1 < tile + end || oldest > tile + first;
            s.new_top[r] = raise(&s.scores[static_cast<size_t>(r) * TILE], s.top[r], first, end, masked,
                                 static_cast<int>(std::clamp<int64_t>(oldest - tile, 0, TILE)),
                                 static_cast<int>(std::clamp<int64_t>(position + 1 - tile, 0, TILE)));
        }
        for (int r = 0; r < rows; r += W) {  // buffers are padded to whole vectors
            const vf new_top = load(&s.new_top[r]);
            store(&s.fade[r], exp2(sub(load(&s.top[r]), new_top)));
            store(&s.top[r], new_top);
        }
        for (int r = 0; r < rows; ++r) {
            const float* scores = &s.scores[static_cast<size_t>(r) * TILE];
            Stored* weights = &s.weights[static_cast<size_t>(r) * TILE];
            const vf top = set1(s.top[r]);
            vf sum = mul(load(&s.sum[static_cast<size_t>(r) * W]), set1(s.fade[r]));
            for (int k = first; k < end; k += W) {
                const vf p = exp2(sub(load(scores + k), top));
                sum = add(sum, p);
                T::store_round(weights + k, p);
            }
            store(&s.sum[static_cast<size_t>(r) * W], sum);
        }
    }

    void merge(const Merge& merge, AttentionScratch<T>& s) const {
        const int dim = pages_.dim;
        s.fit(1, dim, wide_);
        for (int head = 0; head < heads_; ++head) {
            float top = FLOOR, sum = 0.0f;
            std::fill_n(s.total_out.begin(), wide_, 0.0f);
            for (int64_t i = 0; i < merge.count; ++i) {
                const float* from = partial(merge.partial + i, head);
                merge_segment(from[0], from[1], from + W, top, sum, s.total_out.data(), wide_);
            }
            write_output<T>(s.total_out.data(), sum, dim, out_ + (static_cast<int64_t>(merge.row) * heads_ + head) * dim);
        }
    }
};

}  // namespace agentserve
