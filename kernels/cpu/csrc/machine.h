// What the machine itself can do, with this library's own threads: the limits that benchmarks
// compare with.
#pragma once

#include "element.h"
#include "team.h"

namespace agentserve {

constexpr int64_t READ_PIECE = int64_t{1} << 20;  // bytes that a thread takes at a time
constexpr int64_t READ_AHEAD = 4096;              // bytes

// Adds a number made of all 32-bit lanes of `data` to `found`; `nbytes` is a multiple of 4.
inline void read_memory(Team& team, const char* data, int64_t nbytes, std::atomic<uint32_t>& found) {
    constexpr int STRIDE = 512, V = STRIDE / (W * 4);
    team.each((nbytes + READ_PIECE - 1) / READ_PIECE, 1, [&](int64_t piece) {
        const char* from = data + piece * READ_PIECE;
        const char* end = data + (nbytes < (piece + 1) * READ_PIECE ? nbytes : (piece + 1) * READ_PIECE);
        vi sums[4];
        UNROLL for (int i = 0; i < 4; ++i) sums[i] = set1_lanes(0);
        for (; from + STRIDE <= end; from += STRIDE) {
            UNROLL for (int line = 0; line < STRIDE; line += 64) __builtin_prefetch(from + line + READ_AHEAD);
            UNROLL for (int v = 0; v < V; ++v)
                sums[v % 4] = add_lanes(sums[v % 4], load_lanes(reinterpret_cast<const uint32_t*>(from) + v * W));
        }
        uint32_t lanes[W], all = 0;
        for (; from < end; from += 4) all += *reinterpret_cast<const uint32_t*>(from);
        const vi sum = add_lanes(add_lanes(sums[0], sums[1]), add_lanes(sums[2], sums[3]));
        std::memcpy(lanes, &sum, sizeof lanes);
        for (uint32_t lane : lanes) all += lane;
        found.fetch_add(all, std::memory_order_relaxed);
    });
}

// Makes the compiler believe that a register is read and changed here.
INLINE void keep(vi& sum) {
#if defined(__x86_64__)
    asm volatile("" : "+v"(sum));
#elif defined(__aarch64__)
    asm volatile("" : "+w"(sum));
#else
    asm volatile("" : "+m"(sum));
#endif
}

// As many sums as a product keeps under way, and nothing loaded: what the instruction alone can do.
// `step(sum)` adds to a sum once.
template <class Step> void repeat_dots(int64_t rounds, vi start, const Step& step) {
    constexpr int SUMS = GEMM_ROWS * GEMM_VECTORS;
    vi sums[SUMS];
    UNROLL for (int i = 0; i < SUMS; ++i) sums[i] = add_lanes(start, set1_lanes(static_cast<uint32_t>(i) << 16));
    for (int64_t round = 0; round < rounds; ++round)
        UNROLL for (int i = 0; i < SUMS; ++i) {
            sums[i] = step(sums[i]);
            keep(sums[i]);
        }
}

template <class T> void repeat_float_dots(int64_t rounds) {
    const vi x = set1_lanes(0x3f803f80);  // 1 and 1 as bfloat16, a little more than 1 as float
    repeat_dots(rounds, x, [x](vi sum) { return as_lanes(T::dot(as_float(sum), x, x)); });
}

// Operations (two per product and sum) of `rounds` rounds in each of `threads` threads. `type` as in
// types.h, 2 for bytes; 0 where this build has no such instruction.
inline double repeat_dots_of(int type, int64_t rounds, int threads) {
    int per_lane = type == 0 ? 4 : 2;
    if (type == 2) {
#if defined(__AVX512VNNI__)
        per_lane = 8;
#else
        return 0.0;
#endif
    }
    with_team(threads, 1, [&](Team& team) {
        team.each(threads, 1, [&](int64_t) {
            if (type == 0) repeat_float_dots<Bf16>(rounds);
            if (type == 1) repeat_float_dots<F32>(rounds);
#if defined(__AVX512VNNI__)
            const vi x = set1_lanes(0x01010101);
            if (type == 2) repeat_dots(rounds, x, [x](vi sum) { return _mm512_dpbusd_epi32(sum, x, x); });
#endif
        });
    });
    return static_cast<double>(threads) * static_cast<double>(rounds) * GEMM_ROWS * GEMM_VECTORS * W * per_lane;
}

}  // namespace agentserve
