// Products with block weights: `sum over groups of scale * (sum of x * code) + offset * (sum of x)`.
//
// A group's sum is one chain from 0 upwards; scale times sum, then offset times the operands' sum,
// are added to an output's total, group after group. The same operations for every number of rows
// and every split among threads. Codes are unpacked once for all rows of a task, some units at a
// time, into operands that stay in the nearest cache.
#pragma once

#include <array>
#include <limits>
#include <utility>

#include "products.h"
#include "unpack_codes.h"

namespace agentserve {

constexpr int BLOCKS_AHEAD = 8192;  // bytes that a panel is fetched ahead

// Operand types: how a group is summed, and how the sum joins a total.

template <class T> struct FloatOperand {
    using Code = typename T::Stored;
    using Sum = vf;
    static constexpr int LANE = T::PAIR;  // codes in a 32-bit lane
    static constexpr bool ROUNDED = false;
    static INLINE Sum dot(Sum sum, vi x, vi w) { return T::dot(sum, x, w); }
    static INLINE vf join(Sum sum, vf scale, vf, vf total) { return fma(scale, sum, total); }
};

// Operands of 8 bits come with 128 added to each, as the machine's products want one side unsigned;
// `start` takes that out of a sum again.
struct ByteOperand {
    using Code = int8_t;
    using Sum = vi;
    static constexpr int LANE = 4;
    static constexpr bool ROUNDED = true;
    static INLINE Sum dot(Sum sum, vi x, vi w) { return dot_bytes(sum, x, w); }
    static INLINE vf join(Sum sum, vf scale, vf x_scale, vf total) { return fma(mul(scale, x_scale), to_float(sum), total); }
};

// Some units of a panel as operands.
template <class Op> struct Unpacked {
    static constexpr int UNITS = 8192 / (UNIT_CODES * static_cast<int>(sizeof(typename Op::Code)));
    static constexpr int UNIT_LANES = UNIT / Op::LANE;
    alignas(64) typename Op::Code codes[UNITS * UNIT_CODES];
    alignas(64) float scale[UNITS * 2][PANEL];
    alignas(64) float offset[UNITS][PANEL];
    alignas(64) int32_t start[Op::ROUNDED ? UNITS * 2 : 1][PANEL];
    int groups, per_unit;  // scales of an output: all, and of each unit
    bool has_offset;

    INLINE const uint32_t* lanes(int group) const {
        return reinterpret_cast<const uint32_t*>(codes) + group * (UNIT_LANES / per_unit) * PANEL;
    }
    INLINE typename Op::Sum begin(int group, int column) const {
        if constexpr (Op::ROUNDED) return load_lanes(reinterpret_cast<const uint32_t*>(start[group] + column));
        else return set1(0.0f);
    }
    // Every group's sum for operands of -128.
    void find_starts() {
        const int steps = UNIT_LANES / per_unit;
        const vi x = set1_lanes(0x80808080u);
        for (int g = 0; g < groups; ++g)
            for (int c = 0; c < PANEL; c += W) {
                vi sum = set1_lanes(0);
                for (int s = 0; s < steps; ++s) sum = dot_bytes(sum, x, load_lanes(lanes(g) + s * PANEL + c));
                store_ints(start[g] + c, sub_lanes(set1_lanes(0), sum));
            }
    }
};

// What a task will read, ahead of it: the rest of its own panel, then the thread's next one.
struct Stream {
    const uint8_t *at, *next;
    int64_t left;  // bytes of the own panel
    INLINE void fetch(int bytes) {
        for (int i = 0; i < bytes; i += 64, at += 64, left -= 64) {
            if (left <= 0) {
                at = next;
                left = std::numeric_limits<int64_t>::max();
            }
            __builtin_prefetch(at);
        }
    }
};

template <class F, class Op>
__attribute__((noinline)) void unpack_units(const uint8_t* panel, int64_t first, int units, Stream& stream, Unpacked<Op>& to) {
    to.groups = units * F::GROUPS;
    to.per_unit = F::GROUPS;
    to.has_offset = F::OFFSET;
    for (int u = 0; u < units; ++u) {
        const uint8_t *head = panel + F::head_at(first + u), *unit = panel + F::unit_at(first + u);
        stream.fetch(F::UNIT_BYTES);
        unpack_scales<F>(head, unit, to.scale + u * F::GROUPS, to.offset[u]);
        unpack_codes<F>(unit + F::SCALES, to.codes + u * UNIT_CODES);
    }
    if constexpr (Op::ROUNDED) to.find_starts();
}

// Stops the compiler from storing a sum in the loop that it is summed in.
template <class Sum> INLINE void keep_in_register(Sum& sum) {
#if defined(__AVX512F__)
    asm("" : "+v"(sum));
#else
    (void)sum;
#endif
}

// Operand rows of one block of rows, from the unit on that stands first in an `Unpacked`.
struct RowBlock {
    const uint32_t* lanes;
    int64_t stride;
    const float *sums, *scales;
    int64_t units;  // between rows of the last two
};

// `ROWS` rows, `AT_ONCE` groups from `group` on, added to the totals. A call of its own: a compiler
// that sees the next group too keeps totals on the stack as well as in memory.
template <class Op, int ROWS, int AT_ONCE>
__attribute__((noinline)) void add_groups(const Unpacked<Op>& w, const RowBlock& x, int group, float (*total)[PANEL]) {
    constexpr int V = GEMM_VECTORS, THIRDS = (ROWS + 2) / 3;
    const int steps = Unpacked<Op>::UNIT_LANES / w.per_unit;
    const bool has_offset = w.has_offset;
    for (int part = 0; part < PANEL / (V * W); ++part) {
        typename Op::Sum sum[AT_ONCE][ROWS][V];
        UNROLL for (int a = 0; a < AT_ONCE; ++a) UNROLL for (int v = 0; v < V; ++v) {
            const auto begin = w.begin(group + a, (part * V + v) * W);
            UNROLL for (int r = 0; r < ROWS; ++r) sum[a][r][v] = begin;
        }
        const uint32_t* b = w.lanes(group) + part * V * W;
        const uint32_t* row[THIRDS];
        UNROLL for (int t = 0; t < THIRDS; ++t) row[t] = x.lanes + 3 * t * x.stride + group * steps;
        for (int s = 0; s < steps; ++s) {
            UNROLL for (int a = 0; a < AT_ONCE; ++a) {
                vi column[V];
                UNROLL for (int v = 0; v < V; ++v) column[v] = load_lanes(b + a * steps * PANEL + v * W);
                UNROLL for (int r = 0; r < ROWS; ++r) {
                    const vi value = set1_lanes(row[r / 3][(r % 3) * x.stride + a * steps]);
                    UNROLL for (int v = 0; v < V; ++v) sum[a][r][v] = Op::dot(sum[a][r][v], value, column[v]);
                }
            }
            b += PANEL;
            UNROLL for (int t = 0; t < THIRDS; ++t) ++row[t];
        }
        UNROLL for (int a = 0; a < AT_ONCE; ++a) UNROLL for (int r = 0; r < ROWS; ++r) UNROLL for (int v = 0; v < V; ++v)
            keep_in_register(sum[a][r][v]);
        UNROLL for (int a = 0; a < AT_ONCE; ++a) {
            const int unit = (group + a) >> (w.per_unit - 1), column = part * V * W;
            vf scale[V], offset[V];
            UNROLL for (int v = 0; v < V; ++v) {
                scale[v] = load(w.scale[group + a] + column + v * W);
                offset[v] = has_offset ? load(w.offset[unit] + column + v * W) : set1(0.0f);
            }
            UNROLL for (int r = 0; r < ROWS; ++r) {
                const vf x_scale = set1(Op::ROUNDED ? x.scales[r * x.units + unit] : 0.0f);
                float* at = total[r] + column;
                vf all[V];
                UNROLL for (int v = 0; v < V; ++v) all[v] = Op::join(sum[a][r][v], scale[v], x_scale, load(at + v * W));
                if (has_offset) {
                    const vf x_sum = set1(x.sums[r * x.units + unit]);
                    UNROLL for (int v = 0; v < V; ++v) all[v] = fma(offset[v], x_sum, all[v]);
                }
                UNROLL for (int v = 0; v < V; ++v) store(at + v * W, all[v]);
            }
        }
    }
}

// Few rows have too few chains under way: several groups at a time.
template <class Op, int ROWS> void add_units(const Unpacked<Op>& w, const RowBlock& x, float (*total)[PANEL]) {
    int group = 0;
    if constexpr (ROWS <= 2)
        for (; group + 4 <= w.groups; group += 4) add_groups<Op, ROWS, 4>(w, x, group, total);
    if constexpr (2 * ROWS <= GEMM_ROWS)
        for (; group + 2 <= w.groups; group += 2) add_groups<Op, ROWS, 2>(w, x, group, total);
    for (; group < w.groups; ++group) add_groups<Op, ROWS, 1>(w, x, group, total);
}

template <class Op> using AddUnits = void (*)(const Unpacked<Op>&, const RowBlock&, float (*)[PANEL]);

template <class Op, size_t... R> constexpr std::array<AddUnits<Op>, sizeof...(R)> add_units_of(std::index_sequence<R...>) {
    return {&add_units<Op, static_cast<int>(R) + 1>...};
}

template <class Op>
void blocks_product(const Panel& panel, int64_t units, const uint8_t* next, const Operand& x, int64_t begin, int64_t end,
                    const RowBlocks& split, float (*total)[PANEL]) {
    static constexpr auto add = add_units_of<Op>(std::make_index_sequence<GEMM_ROWS>());
    using U = Unpacked<Op>;
    U unpacked;
    with_format(panel.format, [&](auto f) {
        using F = decltype(f);
        Stream stream{panel.data + BLOCKS_AHEAD, next, F::panel_bytes(units) - BLOCKS_AHEAD};
        for (int64_t unit = 0; unit < units; unit += U::UNITS) {
            const int count = static_cast<int>(std::min<int64_t>(U::UNITS, units - unit));
            unpack_units<F, Op>(panel.data, unit, count, stream, unpacked);
            for (int64_t block = begin; block < end; ++block) {
                const int64_t row = split.first(block), height = split.first(block + 1) - row, at = row * units + unit;
                const RowBlock rows{Op::ROUNDED ? x.codes + at * U::UNIT_LANES : x.lanes + row * x.stride + unit * U::UNIT_LANES,
                                    Op::ROUNDED ? units * U::UNIT_LANES : x.stride, x.sums + at, x.scales + at, units};
                add[static_cast<size_t>(height - 1)](unpacked, rows, total + (row - split.first(begin)));
            }
        }
    });
}

template <class T> void unpack_blocks(const Panel& panel, int column, int64_t units, float* out) {
    using Op = FloatOperand<T>;
    Unpacked<Op> unpacked;
    with_format(panel.format, [&](auto f) {
        using F = decltype(f);
        Stream stream{panel.data, panel.data, F::panel_bytes(units)};
        for (int64_t u = 0; u < units; ++u) {
            unpack_units<F, Op>(panel.data, u, 1, stream, unpacked);
            for (int k = 0; k < UNIT; ++k) {
                const float value = unpacked.scale[k * F::GROUPS / UNIT][column] * T::widen(unpacked.codes[place(Op::LANE, k, column)]);
                out[u * UNIT + k] = F::OFFSET ? value + unpacked.offset[0][column] : value;
            }
        }
    });
}

}  // namespace agentserve
