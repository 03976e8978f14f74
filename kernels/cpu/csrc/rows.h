// Operations on one row at a time: norms and rotary embedding.
#pragma once

#include <cmath>

#include "element.h"

namespace agentserve {

// 1 / root of the mean square of `n` floats.
INLINE float inverse_rms(const float* x, int64_t n, float eps) {
    vf sum[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        UNROLL for (int v = 0; v < 4; ++v) {
            const vf a = load(x + i + v * W);
            sum[v] = fma(a, a, sum[v]);
        }
    float rest = 0.0f;
    for (; i < n; ++i) rest = std::fma(x[i], x[i], rest);
    const float total = sum_lanes(add(add(sum[0], sum[1]), add(sum[2], sum[3]))) + rest;
    return 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
}

// out = x / rms(x) * weight, rounded once.
template <class T>
INLINE void rms_norm(const float* x, const float* weight, int64_t n, float eps, typename T::Stored* out) {
    const float scale = inverse_rms(x, n, eps);
    int64_t i = 0;
    for (; i + W <= n; i += W) T::store_round(out + i, mul(mul(load(x + i), set1(scale)), load(weight + i)));
    for (; i < n; ++i) out[i] = T::round(x[i] * scale * weight[i]);
}

// Whether none of `n` numbers is infinite or NaN.
template <class T> INLINE bool all_finite(const typename T::Stored* x, int64_t n) {
    vi largest = set1_lanes(0);
    int64_t i = 0;
    for (; i + W <= n; i += W) largest = max_bits(largest, magnitude(T::load_wide(x + i)));
    bool rest = true;
    for (; i < n; ++i) rest = rest && std::isfinite(T::widen(x[i]));
    return rest && std::isfinite(max_bits_of(largest));
}

// Rotates `dim` floats in place, first half against second.
INLINE void rotate(float* x, const float* cos, const float* sin, int64_t dim) {
    const int64_t half = dim / 2;
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        const vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(x + i, sub(mul(a, c), mul(b, s)));
        store(x + half + i, add(mul(b, c), mul(a, s)));
    }
    for (; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

template <class T> INLINE void widen_row(const typename T::Stored* from, int64_t n, float* to) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, T::load_wide(from + i));
    for (; i < n; ++i) to[i] = T::widen(from[i]);
}

template <class T> INLINE void round_row(const float* from, int64_t n, typename T::Stored* to) {
    int64_t i = 0;
    for (; i + W <= n; i += W) T::store_round(to + i, load(from + i));
    for (; i < n; ++i) to[i] = T::round(from[i]);
}

}  // namespace agentserve
