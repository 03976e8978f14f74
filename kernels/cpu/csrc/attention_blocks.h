// Some products of attention: scores of some queries against some keys, weighted sums of values.
#pragma once

#include "attention_scratch.h"

namespace agentserve {

// scores[r][v] = scales[v] * (query r . keys of vector v); keys[v] points at the first lane of W keys,
// `key_stride` bytes before the next. Source: LaneSource.
template <class T, class Source, int ROWS, int V>
__attribute__((noinline)) void score_block(const uint32_t* q, int64_t q_stride, const char* const* keys, int64_t key_stride, int lanes,
                 const float* scales, const Ahead& ahead, int first, float* scores) {
    vf acc[ROWS][V];
    UNROLL for (int r = 0; r < ROWS; ++r) UNROLL for (int v = 0; v < V; ++v) acc[r][v] = set1(0.0f);
    const char* k[V];
    const char* next[V];
    UNROLL for (int v = 0; v < V; ++v) {
        k[v] = keys[v];
        next[v] = ahead.at[(first + v) * W / KEY_BLOCK] + (first + v) * W % KEY_BLOCK * 4;
    }
    const int64_t step = ahead.step;
    for (int s = 0; s < lanes; ++s) {
        vi key[V];
        UNROLL for (int v = 0; v < V; ++v) {
            key[v] = Source::load(k[v]);
            k[v] += key_stride;
            __builtin_prefetch(next[v]);
            next[v] += step;
        }
        UNROLL for (int r = 0; r < ROWS; ++r) {
            const vi x = set1_lanes(q[r * q_stride + s]);
            UNROLL for (int v = 0; v < V; ++v) acc[r][v] = T::dot(acc[r][v], x, key[v]);
        }
    }
    UNROLL for (int r = 0; r < ROWS; ++r)
        UNROLL for (int v = 0; v < V; ++v)
            store(scores + r * TILE + v * W, mul(acc[r][v], load(scales + v * W)));
}

// out[r] = out[r] * fade[r] + weights[r] . values, over `blocks` key blocks. `part`: which W of dim.
template <class T, class Source, int ROWS, int V>
__attribute__((noinline)) void value_block(const uint32_t* weights, const char* const* values, int blocks, int64_t dim, const float* fade,
                 const Ahead& ahead, int part, float* out) {
    constexpr int STRIDE = TILE / T::PAIR;
    vf acc[ROWS][V];
    UNROLL for (int r = 0; r < ROWS; ++r)
        UNROLL for (int v = 0; v < V; ++v) acc[r][v] = mul(load(out + r * dim + v * W), set1(fade[r]));
    for (int block = 0; block < blocks; ++block) {
        const char* at = values[block];
        const uint32_t* p = weights + block * BLOCK_LANES<T>;
        const char* next = ahead.at[block] + part * BLOCK_LANES<T> * ahead.step;
        for (int s = 0; s < BLOCK_LANES<T>; ++s, at += dim * Source::BYTES) {
            vi value[V];
            UNROLL for (int v = 0; v < V; ++v) {
                value[v] = Source::load(at + v * W * Source::BYTES);
                __builtin_prefetch(next);
                next += ahead.step;
            }
            UNROLL for (int r = 0; r < ROWS; ++r) {
                const vi x = set1_lanes(p[r * STRIDE + s]);
                UNROLL for (int v = 0; v < V; ++v) acc[r][v] = T::dot(acc[r][v], x, value[v]);
            }
        }
    }
    UNROLL for (int r = 0; r < ROWS; ++r) UNROLL for (int v = 0; v < V; ++v) store(out + r * dim + v * W, acc[r][v]);
}

template <int N> struct Number {
    static constexpr int value = N;
};

// `body(Number<n>)` with the largest n <= count of those from N downwards, for 1 <= count.
template <int N, class Body> INLINE void with_rows(int count, const Body& body) {
    if (N == 1 || count >= N) body(Number<N>());
    else with_rows<(N > 1 ? N - 1 : 1)>(count, body);
}

// The same with powers of two, for vectors: these come in whole key blocks.
template <int N, class Body> INLINE void with_vectors(int count, const Body& body) {
    if (N * W <= KEY_BLOCK || count >= N) body(Number<N>());
    else with_vectors<(N * W > KEY_BLOCK ? N / 2 : N)>(count, body);
}

// out = out * fade + weights . values, over `blocks` key blocks from number `first` of a tile on.
template <class T, class Source>
__attribute__((noinline)) void add_values(const char* const* values, Ahead next_keys, int first, int blocks, int rows, int wide,
                                          AttentionScratch<T>& s) {
    const int64_t step = next_keys.step;
    const auto* weights = reinterpret_cast<const uint32_t*>(s.weights.data()) + first * BLOCK_LANES<T>;
    for (int d = 0; d < wide;) {
        with_vectors<ATTENTION_VECTORS>((wide - d) / W, [&](auto v) {
            constexpr int V = decltype(v)::value;
            const char* part[TILE / KEY_BLOCK];
            for (int b = 0; b < blocks; ++b) part[b] = values[b] + d * Source::BYTES;
            for (int r = 0; r < rows;)
                with_rows<ATTENTION_ROWS>(rows - r, [&](auto n) {
                    constexpr int R = decltype(n)::value;
                    next_keys.step = r == 0 ? step : 0;
                    value_block<T, Source, R, V>(weights + r * (TILE / T::PAIR), part, blocks, wide, &s.fade[static_cast<size_t>(r)],
                                                 next_keys, d / W, &s.out[static_cast<size_t>(r) * wide + d]);
                    r += R;
                });
            d += V * W;
        });
    }
}

// scores = scales * (queries . keys), for the vectors `first .. end` of a tile's keys.
template <class T, class Source>
__attribute__((noinline)) void score_tile(const char* const* keys, int64_t key_stride, Ahead ahead, int first, int end, int rows,
                                          int lanes, AttentionScratch<T>& s) {
    const int64_t step = ahead.step;
    const auto* q = reinterpret_cast<const uint32_t*>(s.queries.data());
    for (int v = first; v < end;) {
        with_vectors<ATTENTION_VECTORS>(end - v, [&](auto count) {
            constexpr int V = decltype(count)::value;
            for (int r = 0; r < rows;)
                with_rows<ATTENTION_ROWS>(rows - r, [&](auto n) {
                    constexpr int R = decltype(n)::value;
                    ahead.step = r == 0 ? step : 0;
                    score_block<T, Source, R, V>(q + static_cast<int64_t>(r) * lanes, lanes, keys + v, key_stride, lanes,
                                                 &s.key_scales[static_cast<size_t>(v) * W], ahead, v,
                                                 &s.scores[static_cast<size_t>(r) * TILE + v * W]);
                    r += R;
                });
            v += V;
        });
    }
}

}  // namespace agentserve
