// The register blocks of attention: scores of some queries against some keys, weighted sums of values.
#pragma once

#include "element.h"
#include "plan.h"

namespace agentserve {

constexpr int KEY_BLOCK = 16;  // keys that are computed together

// Head dimension filled up to whole key blocks.
inline int widened(int dim) { return (dim + KEY_BLOCK - 1) / KEY_BLOCK * KEY_BLOCK; }

template <class T> constexpr int BLOCK_LANES = KEY_BLOCK / T::PAIR;

// Memory is kept busy during computation: each block asks, line by line, for what the thread will
// read next. `step` is 0 where another block of rows has asked already.
struct Ahead {
    const char* at[TILE / KEY_BLOCK];  // one address per key block
    int64_t step;                      // bytes per line
};

// scores[r][v] = scale * (query r . keys of vector v); keys[v] points at the first lane of W keys.
// PER_KEY: each key has a scale, the same in all rows; else all have the first one.
template <class T, bool PER_KEY, int ROWS, int V>
void score_block(const uint32_t* q, int64_t q_stride, const uint32_t* const* keys, int64_t key_stride, int lanes,
                 const float* scales, const Ahead& ahead, int first, float* scores) {
    vf acc[ROWS][V];
    UNROLL for (int r = 0; r < ROWS; ++r) UNROLL for (int v = 0; v < V; ++v) acc[r][v] = set1(0.0f);
    const uint32_t* k[V];
    const char* next[V];
    UNROLL for (int v = 0; v < V; ++v) {
        k[v] = keys[v];
        next[v] = ahead.at[(first + v) * W / KEY_BLOCK] + (first + v) * W % KEY_BLOCK * 4;
    }
    const int64_t step = ahead.step;
    for (int s = 0; s < lanes; ++s) {
        vi key[V];
        UNROLL for (int v = 0; v < V; ++v) {
            key[v] = load_lanes(k[v]);
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
            store(scores + r * TILE + v * W, mul(acc[r][v], PER_KEY ? load(scales + v * W) : set1(*scales)));
}

// out[r] = out[r] * fade[r] + weights[r] . values, over `blocks` key blocks. `part`: which W of dim.
template <class T, int ROWS, int V>
void value_block(const uint32_t* weights, const uint32_t* const* values, int blocks, int64_t dim, const float* fade,
                 const Ahead& ahead, int part, float* out) {
    constexpr int STRIDE = TILE / T::PAIR;
    vf acc[ROWS][V];
    UNROLL for (int r = 0; r < ROWS; ++r)
        UNROLL for (int v = 0; v < V; ++v) acc[r][v] = mul(load(out + r * dim + v * W), set1(fade[r]));
    for (int block = 0; block < blocks; ++block) {
        const uint32_t* at = values[block];
        const uint32_t* p = weights + block * BLOCK_LANES<T>;
        const char* next = ahead.at[block] + part * BLOCK_LANES<T> * ahead.step;
        for (int s = 0; s < BLOCK_LANES<T>; ++s, at += dim) {
            vi value[V];
            UNROLL for (int v = 0; v < V; ++v) {
                value[v] = load_lanes(at + v * W);
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

// `body(Number<n>)` with n = min(count, most), for 1 <= count.
template <int N, class Body> INLINE void with_count(int count, const Body& body) {
    if constexpr (N == 1) {
        body(Number<1>());
    } else {
        if (count >= N) body(Number<N>());
        else with_count<N - 1>(count, body);
    }
}

}  // namespace agentserve
