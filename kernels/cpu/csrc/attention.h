// Paged causal attention: streaming softmax over absolute tiles and segments of keys.
//
// For one query: within a segment the running maximum, sum and output follow each other tile by
// tile; segments start afresh and are merged in order. A tile or segment in which a query sees
// nothing changes nothing (weights are exactly 0, scales exactly 1). So a query's bits depend on
// its own keys alone, whatever block, task or step it comes in.
#pragma once

#include <cmath>
#include <limits>

#include "team.h"
#include "tile_reader.h"

namespace agentserve {

constexpr float FLOOR = -1e30f;  // stands for minus infinity where a difference of two is taken
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// One thread's room for one task whose products have operands of T.
template <class T> struct AttentionScratch {
    std::vector<typename T::Stored> queries, weights, block;  // block: a tile's keys, then its values
    std::vector<float> key_scales, value_scales;              // [TILE]
    std::vector<float> scores, out, total_out, top, new_top, sum, fade, total_top, total_sum;

    // `wide`: head dimension filled up to whole key blocks.
    void fit(int rows, int dim, int wide) {
        const auto grow = [](auto& v, size_t n) { if (v.size() < n) v.resize(n); };
        const size_t r = static_cast<size_t>(rows), d = static_cast<size_t>(wide);
        grow(queries, r * static_cast<size_t>(dim));
        grow(weights, r * TILE);
        grow(block, TILE * d);
        grow(scores, r * TILE);
        grow(out, r * d);
        grow(total_out, r * d);
        grow(sum, r * W);
        for (auto* v : {&key_scales, &value_scales}) grow(*v, TILE);
        for (auto* v : {&top, &new_top, &fade, &total_top, &total_sum}) grow(*v, r + W);
    }
};

// One thread's room, whatever its pages hold.
struct AnyScratch {
    AttentionScratch<Bf16> bf16;
    AttentionScratch<F32> f32;
    template <class T> auto& of() {
        if constexpr (std::is_same_v<T, Bf16>) return bf16;
        else return f32;
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

constexpr int ATTENTION_STAGES = 2;  // tasks, merging

inline int64_t partial_floats(int heads, int dim) { return static_cast<int64_t>(heads) * (widened(dim) + W); }

// One KV group's attention for one layer: of a step in S, over pages in K.
template <class S, class K> class Attention {
public:
    using T = Operand<S, K>;
    using Scratch = AttentionScratch<T>;
    using Stored = typename S::Stored;

    Attention(const Plan& plan, const Pages<K>& pages, int heads, const Stored* q, Stored* out, float* partials)
        : plan_(plan), pages_(pages), reader_(pages), heads_(heads), q_(q), out_(out), partials_(partials),
          scale_(1.44269504089f / std::sqrt(static_cast<float>(pages.dim))), wide_(widened(pages.dim)) {}

    void run(Team& team, AnyScratch& any) const {
        Scratch& scratch = any.template of<T>();
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
    const Pages<K>& pages_;
    const TileReader<K, T> reader_;
    const int heads_;
    const Stored* q_;
    Stored* out_;
    float* partials_;
    const float scale_;
    const int wide_;

    float* partial(int64_t number, int head) const { return partials_ + number * partial_floats(heads_, pages_.dim) + head * (wide_ + W); }

    void task(const Task& task, int kv_head, const Piece& next, Scratch& s) const {
        const int group = plan_.group, dim = pages_.dim, rows = task.tokens * group;
        const QueryRow* queries = plan_.queries.data() + task.first;
        s.fit(rows, dim, wide_);
        for (int t = 0; t < task.tokens; ++t)
            load_queries(q_ + (static_cast<int64_t>(queries[t].row) * heads_ + kv_head * group) * dim,
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
            write_output<S>(&s.total_out[static_cast<size_t>(r) * wide_], s.total_sum[r], dim,
                            out_ + (static_cast<int64_t>(queries[r / group].row) * heads_ + kv_head * group + r % group) * dim);
    }

    // The queries of one token's group as operands.
    void load_queries(const Stored* from, typename T::Stored* to) const {
        const int64_t n = static_cast<int64_t>(plan_.group) * pages_.dim;
        if constexpr (std::is_same_v<S, T>) std::memcpy(to, from, static_cast<size_t>(n) * sizeof(Stored));
        else widen_row<S>(from, n, to);
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
        const int first = range.first(), end = range.end();
        const uint32_t* keys[TILE / W];
        const uint32_t* values[TILE / KEY_BLOCK];
        reader_.keys(range, s.block.data(), keys);
        if constexpr (SCALED<K>) {
            reader_.scales(range, range.kv_head, scale_, s.key_scales.data());
            reader_.scales(range, pages_.kv_heads + range.kv_head, 1.0f, s.value_scales.data());
        }
        const int rows = task.tokens * plan_.group;
        score_tile(keys, reader_.values_ahead(range), first * KEY_BLOCK / W, end * KEY_BLOCK / W, rows, s);
        soften(task, range.tile, first * KEY_BLOCK, end * KEY_BLOCK, s);
        reader_.values(range, s.block.data(), values);
        add_values(values + first, next_keys, first, end, rows, s);
    }

    // out = out * fade + weights . values, over key blocks `first .. end` of a tile.
    void add_values(const uint32_t* const* values, Ahead next_keys, int first, int end, int rows, Scratch& s) const {
        const int64_t step = next_keys.step;
        const auto* weights = reinterpret_cast<const uint32_t*>(s.weights.data()) + first * BLOCK_LANES<T>;
        for (int d = 0; d < wide_;) {
            int taken = 0;
            with_count<ATTENTION_VECTORS>((wide_ - d) / W, [&](auto v) {
                constexpr int V = decltype(v)::value;
                const uint32_t* part[TILE / KEY_BLOCK];
                for (int b = 0; b < end - first; ++b) part[b] = values[b] + d;
                for (int r = 0; r < rows;)
                    with_count<ATTENTION_ROWS>(rows - r, [&](auto n) {
                        constexpr int R = decltype(n)::value;
                        next_keys.step = r == 0 ? step : 0;
                        value_block<T, R, V>(weights + r * (TILE / T::PAIR), part, end - first, wide_, &s.fade[r], next_keys, d / W,
                                             &s.out[static_cast<size_t>(r) * wide_ + d]);
                        r += R;
                    });
                taken = V * W;
            });
            d += taken;
        }
    }

    void score_tile(const uint32_t* const* keys, Ahead ahead, int first, int end, int rows, Scratch& s) const {
        const int lanes = pages_.dim / T::PAIR;
        const int64_t step = ahead.step, key_stride = reader_.key_stride();
        const auto* q = reinterpret_cast<const uint32_t*>(s.queries.data());
        for (int v = first; v < end;) {
            int taken = 0;
            with_count<ATTENTION_VECTORS>(end - v, [&](auto count) {
                constexpr int V = decltype(count)::value;
                for (int r = 0; r < rows;)
                    with_count<ATTENTION_ROWS>(rows - r, [&](auto n) {
                        constexpr int R = decltype(n)::value;
                        ahead.step = r == 0 ? step : 0;
                        score_block<T, SCALED<K>, R, V>(q + static_cast<int64_t>(r) * lanes, lanes, keys + v, key_stride, lanes,
                                                        SCALED<K> ? &s.key_scales[static_cast<size_t>(v) * W] : &scale_, ahead, v,
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
        for (int r = 0; r < rows; ++r) {
            const Sight seen = sight(queries[r / group], tile, first, end);
            s.new_top[r] = raise(&s.scores[static_cast<size_t>(r) * TILE], s.top[r], first, end, seen.masked, seen.low, seen.high);
        }
        for (int r = 0; r < rows; r += W) {  // buffers are padded to whole vectors
            const vf new_top = load(&s.new_top[r]);
            store(&s.fade[r], exp2(sub(load(&s.top[r]), new_top)));
            store(&s.top[r], new_top);
        }
        for (int r = 0; r < rows; ++r) {
            const float* scores = &s.scores[static_cast<size_t>(r) * TILE];
            typename T::Stored* weights = &s.weights[static_cast<size_t>(r) * TILE];
            const vf top = set1(s.top[r]);
            vf sum = mul(load(&s.sum[static_cast<size_t>(r) * W]), set1(s.fade[r]));
            for (int k = first; k < end; k += W) {
                const vf p = exp2(sub(load(scores + k), top));
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
        const int dim = pages_.dim;
        s.fit(1, dim, wide_);
        for (int head = 0; head < heads_; ++head) {
            float top = FLOOR, sum = 0.0f;
            std::fill_n(s.total_out.begin(), wide_, 0.0f);
            for (int64_t i = 0; i < merge.count; ++i) {
                const float* from = partial(merge.partial + i, head);
                merge_segment(from[0], from[1], from + W, top, sum, s.total_out.data(), wide_);
            }
            write_output<S>(s.total_out.data(), sum, dim, out_ + (static_cast<int64_t>(merge.row) * heads_ + head) * dim);
        }
    }
};

}  // namespace agentserve
