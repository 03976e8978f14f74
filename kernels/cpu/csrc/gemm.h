// Matrix products over packed weights, `out[m][n] = sum over k of a[m][k] * w[n][k]`.
//
// Plain weights lie in panels of PANEL outputs: `[k lanes][PANEL]` 32-bit lanes. An output is one
// chain of sums over k, from 0 upwards, in a register of its own: the same operations for every
// number of rows and every split among threads, hence the same bits. Block weights: `blocks.h`.
#pragma once

#include "products.h"
#include "team.h"

namespace agentserve {

// Blocks of rows that a thread takes at a time: many, so that a panel is unpacked once for all of
// them, but fewer where threads would otherwise have too few tasks.
constexpr int MOST_BLOCKS = 19, FEW_BLOCKS = 6;

// What one task computes: at most `MOST_BLOCKS` blocks of rows of a panel.
using Totals = float[MOST_BLOCKS * GEMM_ROWS][PANEL];

inline int64_t row_chunks(int64_t blocks, int64_t panels, int64_t threads) {
    const int64_t fewest = (blocks + MOST_BLOCKS - 1) / MOST_BLOCKS, most = (blocks + FEW_BLOCKS - 1) / FEW_BLOCKS;
    return std::clamp(PIECES_PER_THREAD * threads / std::max<int64_t>(1, panels), fewest, most);  // a matrix may be empty
}

// Calls `finish(first row, rows, panel, totals)` for every task of the product, `last()` once after all.
template <class T, class Finish, class Last = Nothing>
void product(Team& team, const Matrix& w, const Operand& a, int rows, const Finish& finish, const Last& last = {}) {
    const int64_t blocks = (rows + GEMM_ROWS - 1) / GEMM_ROWS, chunks = row_chunks(blocks, w.panel_count, team.threads());
    const int64_t count = static_cast<int64_t>(w.panel_count) * chunks;
    const RowBlocks split{rows, blocks};
    team.each_ahead(count, MOST_PARTS, [&](int64_t i, int64_t next) {
        const Panel& panel = w.panels[i / chunks];
        const int64_t chunk = i % chunks, begin = blocks * chunk / chunks, end = blocks * (chunk + 1) / chunks;
        const int first = static_cast<int>(split.first(begin)), height = static_cast<int>(split.first(end)) - first;
        alignas(64) Totals total;
        if (panel.format == PLAIN) {
            for (int64_t block = begin; block < end; ++block) {
                const int64_t row = split.first(block);
                plain_product<T>(static_cast<int>(split.first(block + 1) - row), a.lanes + row * a.stride, a.stride,
                                 reinterpret_cast<const uint32_t*>(panel.data), w.steps, total + (row - first));
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
