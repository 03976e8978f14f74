// The register blocks of attention: scores of some queries against some keys, weighted sums of values.
#pragma once

#include "element.h"
#include "plan.h"

namespace agentserve {

constexpr int KEY_BLOCK = 16;  // keys that are computed together

template <class T> constexpr int BLOCK_LANES = KEY_BLOCK / T::PAIR;

// scores[r][v] = scale * (query r . keys of vector v); keys[v] points at the first lane of W keys.
template <class T, int ROWS, int V>
void score_block(const uint32_t* q, int64_t q_stride, const uint32_t* const* keys, int64_t key_stride, int lanes,
                 float scale, float* scores) {
    vf acc[ROWS][V];
    UNROLL for (int r = 0; r < ROWS; ++r) UNROLL for (int v = 0; v < V; ++v) acc[r][v] = set1(0.0f);
    const uint32_t* k[V];
    UNROLL for (int v = 0; v < V; ++v) k[v] = keys[v];
    for (int s = 0; s < lanes; ++s) {
        vi key[V];
        UNROLL for (int v = 0; v < V; ++v) {
            key[v] = load_lanes(k[v]);
            k[v] += key_stride;
        }
        UNROLL for (int r = 0; r < ROWS; ++r) {
            const vi x = set1_lanes(q[r * q_stride + s]);
            UNROLL for (int v = 0; v < V; ++v) acc[r][v] = T::dot(acc[r][v], x, key[v]);
        }
    }
    UNROLL for (int r = 0; r < ROWS; ++r)
        UNROLL for (int v = 0; v < V; ++v) store(scores + r * TILE + v * W, mul(acc[r][v], set1(scale)));
}

// out[r] = out[r] * fade[r] + weights[r] . values, over `blocks` key blocks.
template <class T, int ROWS, int V>
void value_block(const uint32_t* weights, const uint32_t* const* values, int blocks, int64_t dim, const float* fade,
                 float* out) {
    constexpr int STRIDE = TILE / T::PAIR;
    vf acc[ROWS][V];
    UNROLL for (int r = 0; r < ROWS; ++r)
        UNROLL for (int v = 0; v < V; ++v) acc[r][v] = mul(load(out + r * dim + v * W), set1(fade[r]));
    for (int block = 0; block < blocks; ++block) {
        const uint32_t* at = values[block];
        const uint32_t* p = weights + block * BLOCK_LANES<T>;
        for (int s = 0; s < BLOCK_LANES<T>; ++s, at += dim) {
            vi value[V];
            UNROLL for (int v = 0; v < V; ++v) value[v] = load_lanes(at + v * W);
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
