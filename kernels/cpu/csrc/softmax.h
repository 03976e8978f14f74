// Streaming softmax over absolute tiles and segments of keys.
//
// For one query: within a segment the running maximum, sum and output follow each other tile by
// tile; segments start afresh and are merged in order. A tile or segment in which a query sees
// nothing changes nothing (weights are exactly 0, scales exactly 1). So a query's bits depend on
// its own keys alone, whatever block, task or step it comes in.
#pragma once

#include <cmath>
#include <limits>

#include "attention.h"
#include "attention_blocks.h"
#include "tile_reader.h"

namespace agentserve {

constexpr float FLOOR = -1e30f;  // stands for minus infinity where a difference of two is taken
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

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

// One KV group's attention for one layer: over pages in K, with products in T, of a step in T or in bfloat16.
template <class T, class K> class Attention {
public:
    using Scratch = AttentionScratch<T>;

    template <class S>
    Attention(const AttentionRows<S>& rows, const Pages<K>& pages)
        : plan_(rows.plan), pages_(pages), reader_(pages), heads_(rows.heads), widened_(!std::is_same_v<S, T>), q_(rows.q), out_(rows.out),
          partials_(rows.partials), scale_(1.44269504089f / std::sqrt(static_cast<float>(pages.dim))), wide_(widened(pages.dim)) {}

    void run(Team& team, AnyScratch& any) const {
        Scratch& scratch = any.template of<T>();
        // One thread takes all heads of a task, which are neighbours in memory, where tasks are many and small.
        const auto tasks = static_cast<int64_t>(plan_.tasks.size());
        const bool many = tasks >= PIECES_PER_THREAD * team.threads() && plan_.largest <= SPLIT_TOKENS;
        const int kv_heads = pages_.kv_heads, heads = many ? kv_heads : 1;
        const int64_t count = tasks * (kv_heads / heads);
        const auto piece = [&](int64_t i, int head) {
            if (i >= count) return Piece{};
            const int64_t at = i * heads + head;
            return Piece{&plan_.tasks[static_cast<size_t>(at / kv_heads)], static_cast<int>(at % kv_heads)};
        };
        const auto merges = static_cast<int64_t>(plan_.merges.size());
        const auto one = [&](int64_t i) { merge(plan_.merges[static_cast<size_t>(i)], scratch); };
        const bool few = merges <= FEW;
        team.each_ahead(
            count, 1,
            [&](int64_t i, int64_t next) {
                for (int head = 0; head < heads; ++head)
                    task(piece(i, head), head + 1 < heads ? piece(i, head + 1) : piece(next, 0), scratch);
            },
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
    const Pages<K>& pages_;
    const TileReader<K, T> reader_;
    const int heads_;
    const bool widened_;  // the step is in bfloat16, and T is not
    const void* q_;
    void* out_;
    float* partials_;
    const float scale_;
    const int wide_;

    float* partial(int64_t number, int head) const { return partials_ + number * partial_floats(heads_, pages_.dim) + head * (wide_ + W); }

    void task(const Piece& piece, const Piece& next, Scratch& s) const {
        const Task& task = *piece.task;
        const int kv_head = piece.kv_head;
        const int group = plan_.group, dim = pages_.dim, rows = task.tokens * group;
        const QueryRow* queries = plan_.queries.data() + task.first;
        s.fit(rows, dim, wide_);
        if constexpr (!SCALED<K>) std::fill_n(s.key_scales.begin(), TILE, scale_);
        for (int t = 0; t < task.tokens; ++t)
            load_queries((static_cast<int64_t>(queries[t].row) * heads_ + kv_head * group) * dim,
                         &s.queries[static_cast<size_t>(t) * group * dim]);
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
            write(&s.total_out[static_cast<size_t>(r) * wide_], s.total_sum[r],
                  static_cast<int64_t>(queries[r / group].row) * heads_ + kv_head * group + r % group);
    }

    // The queries of one token's group, from element `at` on, as operands.
    void load_queries(int64_t at, typename T::Stored* to) const {
        const int64_t n = static_cast<int64_t>(plan_.group) * pages_.dim;
        if (widened_) {
            if constexpr (std::is_same_v<T, F32>) widen_row<Bf16>(static_cast<const uint16_t*>(q_) + at, n, to);
        } else {
            std::memcpy(to, static_cast<const typename T::Stored*>(q_) + at, static_cast<size_t>(n) * sizeof *to);
        }
    }

    // The result of query `number` of `[rows][heads]`.
    void write(const float* total, float sum, int64_t number) const {
        const int dim = pages_.dim;
        if (widened_) write_output<Bf16>(total, sum, dim, static_cast<uint16_t*>(out_) + number * dim);
        else write_output<T>(total, sum, dim, static_cast<typename T::Stored*>(out_) + number * dim);
    }

    // One segment of a task's keys, from nothing.
    void walk(const Task& task, int64_t segment, int kv_head, const Piece& next, Scratch& s) const {
        const int rows = task.tokens * plan_.group;
        std::fill_n(s.top.begin(), rows, FLOOR);
        std::fill_n(s.sum.begin(), static_cast<size_t>(rows) * W, 0.0f);
        std::fill_n(s.out.begin(), static_cast<size_t>(rows) * wide_, 0.0f);
        for (int64_t tile = segment * SEGMENT; tile < (segment + 1) * SEGMENT; tile += TILE) {
            const TileRange range = range_of(task, tile, kv_head);
            if (range.low >= range.high) continue;
            const bool more = tile + TILE < std::min(task.end, (task.segment + task.segments) * SEGMENT);
            walk_tile(task, range, more ? reader_.keys_ahead(range_of(task, tile + TILE, kv_head)) : first_keys(next), s);
        }
    }

    static TileRange range_of(const Task& task, int64_t tile, int kv_head) {
        return {task.table, tile, std::max(tile, task.begin), std::min(tile + TILE, task.end), kv_head};
    }
    Ahead first_keys(const Piece& next) const {
        if (!next.task) return Ahead{{}, 0};
        const int64_t low = std::max(next.task->segment * SEGMENT, next.task->begin);
        return reader_.keys_ahead(range_of(*next.task, low / TILE * TILE, next.kv_head));
    }

    void walk_tile(const Task& task, const TileRange& range, const Ahead& next_keys, Scratch& s) const {
        const int rows = task.tokens * plan_.group, first = range.first(), end = range.end();
        const char* keys[TILE / W];
        const char* values[TILE / KEY_BLOCK];
        const bool direct = reader_.reads_pages(rows), direct_values = reader_.reads_values(range, rows);
        reader_.keys(range, direct, s.block.data(), keys);
        if constexpr (SCALED<K>) {
            reader_.scales(range, range.kv_head, scale_, s.key_scales.data());
            reader_.scales(range, pages_.kv_heads + range.kv_head, 1.0f, s.value_scales.data());
        }
        with_source(direct, [&](auto source) {
            score_tile<T, decltype(source)>(keys, reader_.key_stride(direct), reader_.values_ahead(range), first * KEY_BLOCK / W,
                                            end * KEY_BLOCK / W, rows, pages_.dim / T::PAIR, s);
        });
        soften(task, range.tile, first * KEY_BLOCK, end * KEY_BLOCK, s);
        reader_.values(range, direct_values, s.block.data(), values);
        with_source(direct_values, [&](auto source) {
            add_values<T, decltype(source)>(values + first, next_keys, first, end - first, rows, wide_, s);
        });
    }

    // `body` with the LaneSource of pages or that of operands.
    template <class Body> static void with_source(bool pages, const Body& body) {
        if constexpr (TileReader<K, T>::LANE_FOR_LANE) {
            if (pages) return body(LaneSource<K, T>());
        }
        body(LaneSource<T, T>());
    }

    // The maximum with scores `first .. end` of a tile added; scores outside `low .. high` are hidden.
    static vf raise(float* scores, vf top, int first, int end, bool masked, int low, int high) {
        vf largest = top;
        for (int k = first; k < end; k += W) {
            vf x = load(scores + k);
            if (masked) {
                const vi index = add_lanes(iota(), set1_lanes(static_cast<uint32_t>(k)));
                x = in_range(index, set1_lanes(static_cast<uint32_t>(low)), set1_lanes(static_cast<uint32_t>(high)), x, set1(NOTHING));
                store(scores + k, x);
            }
            largest = max(largest, x);
        }
        return set1(max_lanes(largest));
    }

    // Which keys of a tile a row sees: `low .. high`, counted from the tile's first.
    struct Sight {
        bool masked;  // not all of those in question
        int low, high;
    };
    Sight sight(const QueryRow& query, int64_t tile, int first, int end) const {
        const int64_t position = query.position, oldest = plan_.window > 0 ? position - plan_.window + 1 : 0;
        return {position + 1 < tile + end || oldest > tile + first, static_cast<int>(std::clamp<int64_t>(oldest - tile, 0, TILE)),
                static_cast<int>(std::clamp<int64_t>(position + 1 - tile, 0, TILE))};
    }

    // Scores of a tile's keys `first .. end` become weights against each row's new maximum.
    void soften(const Task& task, int64_t tile, int first, int end, Scratch& s) const {
        const QueryRow* queries = plan_.queries.data() + task.first;
        const int group = plan_.group, rows = task.tokens * group;
        for (int block = 0; block < rows; block += W) {  // buffers are padded to whole vectors
            const vf old_top = load(&s.top[block]);
            vf new_top = old_top;  // lane by lane in a register: a store of parts would hold up its load
            for (int r = block; r < std::min(rows, block + W); ++r) {
                const Sight seen = sight(queries[r / group], tile, first, end);
                const vf top = raise(&s.scores[static_cast<size_t>(r) * TILE], set1(s.top[r]), first, end, seen.masked, seen.low, seen.high);
                const auto lane = static_cast<uint32_t>(r - block);
                new_top = in_range(iota(), set1_lanes(lane), set1_lanes(lane + 1), top, new_top);
            }
            store(&s.fade[block], exp2(sub(old_top, new_top)));
            store(&s.top[block], new_top);
        }
        for (int r = 0; r < rows; ++r) {
            const float* scores = &s.scores[static_cast<size_t>(r) * TILE];
            typename T::Stored* weights = &s.weights[static_cast<size_t>(r) * TILE];
            const vf top = set1(s.top[r]);
            vf sum = mul(load(&s.sum[static_cast<size_t>(r) * W]), set1(s.fade[r]));
            for (int k = first; k < end; k += W) {
                const vf p = T::power(sub(load(scores + k), top));
                sum = add(sum, p);
                T::store_round(weights + k, SCALED<K> ? mul(p, load(&s.value_scales[static_cast<size_t>(k)])) : p);
            }
            store(&s.sum[static_cast<size_t>(r) * W], sum);
            if constexpr (SCALED<K>) hide(sight(queries[r / group], tile, first, end), first, end, weights);
        }
    }

    // Weight 0 for what a row does not see, even where another's value has no finite scale.
    static void hide(const Sight& seen, int first, int end, typename T::Stored* weights) {
        if (!seen.masked) return;
        for (int k = first; k < end; ++k)
            if (k < seen.low || k >= seen.high) weights[k] = typename T::Stored(0);
    }

    void merge(const Merge& merge, Scratch& s) const {
        s.fit(1, pages_.dim, wide_);
        for (int head = 0; head < heads_; ++head) {
            float top = FLOOR, sum = 0.0f;
            std::fill_n(s.total_out.begin(), wide_, 0.0f);
            for (int64_t i = 0; i < merge.count; ++i) {
                const float* from = partial(merge.partial + i, head);
                merge_segment(from[0], from[1], from + W, top, sum, s.total_out.data(), wide_);
            }
            write(s.total_out.data(), sum, static_cast<int64_t>(merge.row) * heads_ + head);
        }
    }
};

template <class S, class K>
void run_attention(Team& team, const AttentionRows<S>& rows, const Pages<K>& pages, AnyScratch& scratch) {
    Attention<KvOperand<S, K>, K>(rows, pages).run(team, scratch);
}

}  // namespace agentserve
