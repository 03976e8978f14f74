// Products with plain weights.
#pragma once

#include <array>
#include <utility>

#include "products.h"

namespace agentserve {

constexpr int AHEAD = 64;  // steps that a panel is fetched ahead

// `rows` rows of A times one panel. Rows are `stride` lanes apart.
template <class T, int ROWS>
void tile_product(const uint32_t* a, int64_t stride, const uint32_t* panel, int steps, float (*out)[PANEL]) {
    constexpr int V = GEMM_VECTORS, THIRDS = (ROWS + 2) / 3;
    for (int part = 0; part < PANEL / (V * W); ++part) {
        vf acc[ROWS][V];
        UNROLL for (int r = 0; r < ROWS; ++r) UNROLL for (int v = 0; v < V; ++v) acc[r][v] = set1(0.0f);
        const uint32_t* b = panel + part * V * W;
        const uint32_t* row[THIRDS];
        UNROLL for (int t = 0; t < THIRDS; ++t) row[t] = a + 3 * t * stride;
        for (int s = 0; s < steps; ++s) {
            __builtin_prefetch(b + AHEAD * PANEL);
            if (V * W > 16) __builtin_prefetch(b + AHEAD * PANEL + 16);
            vi column[V];
            UNROLL for (int v = 0; v < V; ++v) column[v] = load_lanes(b + v * W);
            UNROLL for (int r = 0; r < ROWS; ++r) {
                const vi x = set1_lanes(row[r / 3][(r % 3) * stride]);
                UNROLL for (int v = 0; v < V; ++v) acc[r][v] = T::dot(acc[r][v], x, column[v]);
            }
            b += PANEL;
            UNROLL for (int t = 0; t < THIRDS; ++t) ++row[t];
        }
        UNROLL for (int r = 0; r < ROWS; ++r)
            UNROLL for (int v = 0; v < V; ++v) store(out[r] + (part * V + v) * W, acc[r][v]);
    }
}

using TileProduct = void (*)(const uint32_t*, int64_t, const uint32_t*, int, float (*)[PANEL]);

template <class T, size_t... R> constexpr std::array<TileProduct, sizeof...(R)> tile_products(std::index_sequence<R...>) {
    return {&tile_product<T, static_cast<int>(R) + 1>...};
}

template <class T>
void plain_product(int rows, const uint32_t* a, int64_t stride, const uint32_t* panel, int steps, float (*out)[PANEL]) {
    static constexpr auto products = tile_products<T>(std::make_index_sequence<GEMM_ROWS>());
    products[static_cast<size_t>(rows - 1)](a, stride, panel, steps, out);
}

}  // namespace agentserve
