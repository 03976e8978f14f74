// The two element types. Operands of products are stored as 32-bit lanes along the summed
// dimension: two bfloat16 values (even index in the low half) or one float.
#pragma once

#include "vec.h"

namespace agentserve {

constexpr int MAX_DIM = 512;  // largest head dimension

struct Bf16 {
    using Stored = uint16_t;
    static constexpr int PAIR = 2;  // elements per lane

    static INLINE float widen(Stored a) {
        const uint32_t bits = static_cast<uint32_t>(a) << 16;
        float x;
        std::memcpy(&x, &bits, sizeof x);
        return x;
    }
    static INLINE Stored round(float x) {
        Stored out[W];
        store_bf16(out, set1(x));
        return out[0];
    }
    static INLINE vf load_wide(const Stored* p) { return load_bf16(p); }
    static INLINE void store_round(Stored* p, vf a) { store_bf16(p, a); }
    // 2^x, for what is rounded to this type.
    static INLINE vf power(vf x) { return exp2<Short>(x); }
    // acc + a.low * b.low + a.high * b.high, in the machine's fixed order.
    static INLINE vf dot(vf acc, vi a, vi b) {
#if defined(__AVX512BF16__)
        return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
        const vi high = set1_lanes(0xffff0000u);
        acc = fma(as_float(left<16>(a)), as_float(left<16>(b)), acc);
        return fma(as_float(and_lanes(a, high)), as_float(and_lanes(b, high)), acc);
#endif
    }
};

struct F32 {
    using Stored = float;
    static constexpr int PAIR = 1;

    static INLINE float widen(Stored a) { return a; }
    static INLINE Stored round(float x) { return x; }
    static INLINE vf load_wide(const Stored* p) { return load(p); }
    static INLINE void store_round(Stored* p, vf a) { store(p, a); }
    static INLINE vf power(vf x) { return exp2(x); }
    static INLINE vf dot(vf acc, vi a, vi b) { return fma(as_float(a), as_float(b), acc); }
};

// Register blocks: rows x vectors of accumulators, for sums over lanes.
#if defined(__AVX512F__)
constexpr int GEMM_ROWS = 14, GEMM_VECTORS = 2;
constexpr int ATTENTION_ROWS = 6, ATTENTION_VECTORS = 4;
#elif defined(__AVX2__)
constexpr int GEMM_ROWS = 4, GEMM_VECTORS = 2;
constexpr int ATTENTION_ROWS = 4, ATTENTION_VECTORS = 2;
#else
constexpr int GEMM_ROWS = 4, GEMM_VECTORS = 4;
constexpr int ATTENTION_ROWS = 4, ATTENTION_VECTORS = 4;
#endif

}  // namespace agentserve
