// Matrix products over packed weights, `out[m][n] = sum over k of a[m][k] * w[n][k]`.
//
// Weights lie in panels of PANEL outputs: `[n / PANEL][k lanes][PANEL]` 32-bit lanes. An output is
// one chain of sums over k, from 0 upwards, in a register of its own: the same operations for every
// number of rows and every split among threads, hence the same bits.
#pragma once

#include <array>
#include <utility>

#include "element.h"
#include "team.h"

namespace agentserve {

constexpr int PANEL = 32;
constexpr int CHUNK_BLOCKS = 6;             // blocks of rows that a thread takes at a time
constexpr int AHEAD = 64;                  // steps that a panel is fetched ahead

struct Matrix {
    const uint32_t* panels;
    const float* bias;  // one per panel column (padded with 0), or null
    int32_t n;          // outputs
    int32_t steps;      // lanes along k
    int32_t panel_count;
};

struct Tile {
    float at[GEMM_ROWS][PANEL];
};

// `rows` rows of A times one panel. Rows are `stride` lanes apart.
template <class T, int ROWS>
void tile_product(const uint32_t* a, int64_t stride, const uint32_t* panel, int steps, Tile& out) {
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
            UNROLL for (int v = 0; v < V; ++v) store(out.at[r] + (part * V + v) * W, acc[r][v]);
    }
}

using TileProduct = void (*)(const uint32_t*, int64_t, const uint32_t*, int, Tile&);

template <class T, size_t... R> constexpr std::array<TileProduct, sizeof...(R)> tile_products(std::index_sequence<R...>) {
    return {&tile_product<T, static_cast<int>(R) + 1>...};
}

// Calls `finish(first row, rows, panel, tile)` for every tile of the product, `last()` once after all.
template <class T, class Finish, class Last = Nothing>
void product(Team& team, const Matrix& w, const uint32_t* a, int64_t stride, int rows, const Finish& finish, const Last& last = {}) {
    static constexpr auto products = tile_products<T>(std::make_index_sequence<GEMM_ROWS>());
    const int64_t blocks = (rows + GEMM_ROWS - 1) / GEMM_ROWS, chunks = (blocks + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS;
    team.each(static_cast<int64_t>(w.panel_count) * chunks, 1, [&](int64_t i) {
        const int panel = static_cast<int>(i / chunks);
        const int64_t chunk = i % chunks, end = blocks * (chunk + 1) / chunks;
        const uint32_t* weights = w.panels + static_cast<int64_t>(panel) * w.steps * PANEL;
        alignas(64) Tile tile;
        for (int64_t block = blocks * chunk / chunks; block < end; ++block) {
            const int first = static_cast<int>(rows * block / blocks);
            const int height = static_cast<int>(rows * (block + 1) / blocks) - first;
            products[height - 1](a + first * stride, stride, weights, w.steps, tile);
            if (w.bias) {
                const float* bias = w.bias + static_cast<int64_t>(panel) * PANEL;
                for (int r = 0; r < height; ++r)
                    for (int c = 0; c < PANEL; c += W) store(tile.at[r] + c, add(load(tile.at[r] + c), load(bias + c)));
            }
            finish(first, height, panel, tile);
        }
    }, last);
}

INLINE int panel_width(const Matrix& w, int panel) {
    const int left = w.n - panel * PANEL;
    return left < PANEL ? left : PANEL;
}

// What becomes of a tile. Each writes only columns that exist.

struct StoreFloat {
    const Matrix& w;
    float* out;
    int64_t stride;
    void operator()(int first, int rows, int panel, const Tile& tile) const {
        const size_t bytes = static_cast<size_t>(panel_width(w, panel)) * sizeof(float);
        for (int r = 0; r < rows; ++r) std::memcpy(out + (first + r) * stride + panel * PANEL, tile.at[r], bytes);
    }
};

template <class T> struct StoreRounded {
    const Matrix& w;
    typename T::Stored* out;
    int64_t stride;
    void operator()(int first, int rows, int panel, const Tile& tile) const {
        const int width = panel_width(w, panel);
        for (int r = 0; r < rows; ++r) {
            typename T::Stored row[PANEL];
            for (int c = 0; c < PANEL; c += W) T::store_round(row + c, load(tile.at[r] + c));
            std::memcpy(out + (first + r) * stride + panel * PANEL, row, static_cast<size_t>(width) * sizeof row[0]);
        }
    }
};

struct AddFloat {
    const Matrix& w;
    float* out;
    int64_t stride;
    void operator()(int first, int rows, int panel, const Tile& tile) const {
        const int width = panel_width(w, panel);
        for (int r = 0; r < rows; ++r) {
            float* to = out + (first + r) * stride + panel * PANEL;
            int c = 0;
            for (; c + W <= width; c += W) store(to + c, add(load(to + c), load(tile.at[r] + c)));
            for (; c < width; ++c) to[c] += tile.at[r][c];
        }
    }
};

INLINE vf silu_mul(vf gate, vf up) {
    const vf x = max(min(mul(gate, set1(-1.44269504089f)), set1(126.0f)), set1(-126.0f));
    const vf sigmoid = div(set1(1.0f), add(set1(1.0f), exp2(x)));
    return mul(mul(gate, sigmoid), up);
}

// A panel of gate_up holds PANEL / 2 gates, then the ups that belong to them.
template <class T> struct GateUp {
    int inner;
    typename T::Stored* out;
    int64_t stride;
    void operator()(int first, int rows, int panel, const Tile& tile) const {
        constexpr int HALF = PANEL / 2;
        const int left = inner - panel * HALF, width = left < HALF ? left : HALF;
        for (int r = 0; r < rows; ++r) {
            typename T::Stored row[HALF];
            for (int c = 0; c < HALF; c += W)
                T::store_round(row + c, silu_mul(load(tile.at[r] + c), load(tile.at[r] + HALF + c)));
            std::memcpy(out + (first + r) * stride + panel * HALF, row, static_cast<size_t>(width) * sizeof row[0]);
        }
    }
};

// Packs row-major `w [n][k]`; `pair_halves`: n is 2 * inner, gates then ups (see GateUp).
template <class T>
void pack(Team& team, const typename T::Stored* w, int64_t n, int64_t k, bool pair_halves, uint32_t* panels) {
    const int64_t steps = (k + T::PAIR - 1) / T::PAIR, half = PANEL / 2, inner = n / 2;
    const int64_t count = pair_halves ? (inner + half - 1) / half : (n + PANEL - 1) / PANEL;
    team.each(count, 1, [&](int64_t panel) {
        auto* to = reinterpret_cast<typename T::Stored*>(panels + panel * steps * PANEL);
        for (int64_t c = 0; c < PANEL; ++c) {
            int64_t row = panel * PANEL + c;
            bool there = row < n;
            if (pair_halves) {
                const int64_t unit = panel * half + c % half;
                there = unit < inner;
                row = c < half ? unit : inner + unit;
            }
            for (int64_t i = 0; i < steps * T::PAIR; ++i)
                to[(i / T::PAIR * PANEL + c) * T::PAIR + i % T::PAIR] = there && i < k ? w[row * k + i] : typename T::Stored(0);
        }
    });
}

// Row `row` of the unpacked matrix, `k` values in float.
template <class T> void unpack_row(const Matrix& w, int64_t row, int64_t k, float* out) {
    const auto* from = reinterpret_cast<const typename T::Stored*>(w.panels + row / PANEL * w.steps * PANEL);
    const int64_t c = row % PANEL;
    for (int64_t i = 0; i < k; ++i) out[i] = T::widen(from[(i / T::PAIR * PANEL + c) * T::PAIR + i % T::PAIR]);
}

}  // namespace agentserve
