// Matrix products over packed weights, `out[m][n] = sum over k of a[m][k] * w[n][k]`.
//
// Plain weights lie in panels of PANEL outputs: `[k lanes][PANEL]` 32-bit lanes. An output is one
// chain of sums over k, from 0 upwards, in a register of its own: the same operations for every
// number of rows and every split among threads, hence the same bits. Block weights: `blocks.h`.
#pragma once

#include <array>
#include <utility>

#include "blocks.h"
#include "team.h"

namespace agentserve {

constexpr int CHUNK_BLOCKS = 6;             // blocks of rows that a thread takes at a time
constexpr int AHEAD = 64;                  // steps that a panel is fetched ahead

// What one task computes: `CHUNK_BLOCKS` blocks of rows of a panel.
using Totals = float[CHUNK_BLOCKS * GEMM_ROWS][PANEL];

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

// Calls `finish(first row, rows, panel, totals)` for every task of the product, `last()` once after all.
template <class T, class Finish, class Last = Nothing>
void product(Team& team, const Matrix& w, const Operand& a, int rows, const Finish& finish, const Last& last = {}) {
    static constexpr auto products = tile_products<T>(std::make_index_sequence<GEMM_ROWS>());
    const int64_t blocks = (rows + GEMM_ROWS - 1) / GEMM_ROWS, chunks = (blocks + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS;
    const int64_t count = static_cast<int64_t>(w.panel_count) * chunks;
    const RowBlocks split{rows, blocks};
    team.each_ahead(count, [&](int64_t i, int64_t next) {
        const Panel& panel = w.panels[i / chunks];
        const int64_t chunk = i % chunks, begin = blocks * chunk / chunks, end = blocks * (chunk + 1) / chunks;
        const int first = static_cast<int>(split.first(begin)), height = static_cast<int>(split.first(end)) - first;
        alignas(64) Totals total;
        if (panel.format == PLAIN) {
            for (int64_t block = begin; block < end; ++block) {
                const int64_t row = split.first(block);
                products[static_cast<size_t>(split.first(block + 1) - row - 1)](
                    a.lanes + row * a.stride, a.stride, reinterpret_cast<const uint32_t*>(panel.data), w.steps, total + (row - first));
            }
        } else {
            std::memset(total, 0, static_cast<size_t>(height) * sizeof total[0]);
            const uint8_t* ahead = w.panels[std::min(next, count - 1) / chunks].data;
            if (w.need == CODES) blocks_product<ByteOperand>(panel, w.units, ahead, a, begin, end, split, total);
            else blocks_product<FloatOperand<T>>(panel, w.units, ahead, a, begin, end, split, total);
        }
        if (w.bias) {
            const float* bias = w.bias + (i / chunks) * PANEL;
            for (int r = 0; r < height; ++r)
                for (int c = 0; c < PANEL; c += W) store(total[r] + c, add(load(total[r] + c), load(bias + c)));
        }
        finish(first, height, panel, total);
    }, last);
}

constexpr int PRODUCT_STAGES = 2;

// A product on its own: `rows` rows of `width` numbers, prepared here as `w` needs them.
template <class T, class Finish, class Last = Nothing>
void prepared_product(Team& team, const Matrix& w, const typename T::Stored* x, int64_t width, int rows, OperandRows<T>& prepared,
                      const Finish& finish, const Last& last = {}) {
    if (w.need) team.each(rows, 1, [&](int64_t r) { prepared.prepare(r, x + r * width, w.need); });
    product<T>(team, w, prepared.operand(x), rows, finish, last);
}

// What becomes of totals. Each writes only columns that exist.

struct StoreFloat {
    float* out;
    int64_t stride;
    void operator()(int first, int rows, const Panel& panel, const float (*total)[PANEL]) const {
        const size_t bytes = static_cast<size_t>(panel.width) * sizeof(float);
        for (int r = 0; r < rows; ++r) std::memcpy(out + (first + r) * stride + panel.first, total[r], bytes);
    }
};

template <class T> struct StoreRounded {
    typename T::Stored* out;
    int64_t stride;
    void operator()(int first, int rows, const Panel& panel, const float (*total)[PANEL]) const {
        for (int r = 0; r < rows; ++r) {
            typename T::Stored row[PANEL];
            for (int c = 0; c < PANEL; c += W) T::store_round(row + c, load(total[r] + c));
            std::memcpy(out + (first + r) * stride + panel.first, row, static_cast<size_t>(panel.width) * sizeof row[0]);
        }
    }
};

struct AddFloat {
    float* out;
    int64_t stride;
    void operator()(int first, int rows, const Panel& panel, const float (*total)[PANEL]) const {
        const int width = panel.width;
        for (int r = 0; r < rows; ++r) {
            float* to = out + (first + r) * stride + panel.first;
            int c = 0;
            for (; c + W <= width; c += W) store(to + c, add(load(to + c), load(total[r] + c)));
            for (; c < width; ++c) to[c] += total[r][c];
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
    typename T::Stored* out;
    int64_t stride;
    void operator()(int first, int rows, const Panel& panel, const float (*total)[PANEL]) const {
        constexpr int HALF = PANEL / 2;
        for (int r = 0; r < rows; ++r) {
            typename T::Stored row[HALF];
            for (int c = 0; c < HALF; c += W)
                T::store_round(row + c, silu_mul(load(total[r] + c), load(total[r] + HALF + c)));
            std::memcpy(out + (first + r) * stride + panel.first, row, static_cast<size_t>(panel.width) * sizeof row[0]);
        }
    }
};

}  // namespace agentserve
