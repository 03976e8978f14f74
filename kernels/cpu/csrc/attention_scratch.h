// What one thread needs for attention.
#pragma once

#include <vector>

#include "key_blocks.h"
#include "kv_formats.h"

namespace agentserve {

// One thread's room for one task whose products have operands of T.
template <class T> struct AttentionScratch {
    std::vector<typename T::Stored> queries, weights, block;  // block: a tile's keys, then its values
    std::vector<float> key_scales, value_scales;              // [TILE]
    std::vector<float> scores, out, total_out, top, sum, fade, total_top, total_sum;

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
        for (auto* v : {&top, &fade, &total_top, &total_sum}) grow(*v, r + W);
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

}  // namespace agentserve
