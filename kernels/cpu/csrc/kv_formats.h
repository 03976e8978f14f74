// What pages keep K and V in, whatever a step computes in: bfloat16, fp16, float, 8-bit codes.
//
// A step reads pages of its own type as they are. Others become operands of its products without
// changing their values: codes are exact in bfloat16, their scales go into the float scores and
// softmax weights; what bfloat16 would round (fp16, float) is computed in float.
#pragma once

#include <limits>
#include <type_traits>

#include "rows.h"
#include "vec_narrow.h"

namespace agentserve {

struct Fp16 {
    using Stored = uint16_t;
    static constexpr int PAIR = 1;

    static INLINE float widen(Stored a) {
        const Stored in[W] = {a};
        float out[W];
        store(out, load_fp16(in));
        return out[0];
    }
    static INLINE Stored round(float x) {
        Stored out[W];
        store_fp16(out, set1(x));
        return out[0];
    }
    static INLINE vf load_wide(const Stored* p) { return load_fp16(p); }
    static INLINE void store_round(Stored* p, vf a) { store_fp16(p, a); }
};

// Codes -127 .. 127 of one token's K or V of one head, which share a float scale.
struct Int8 {
    using Stored = int8_t;
    static constexpr int PAIR = 2;
    static INLINE float widen(Stored a) { return a; }
};

template <class K> constexpr bool SCALED = std::is_same_v<K, Int8>;
template <class K> constexpr int TAIL = SCALED<K> ? sizeof(float) : 0;  // elements beside a token's `dim`

// Operands of the products of a step in S over pages in K.
template <class S, class K>
using Operand = std::conditional_t<std::is_same_v<S, K> || SCALED<K>, S, F32>;

// Mirrored by kernels/cpu/library.py.
enum KvType : int32_t { KV_BF16, KV_F32, KV_FP16, KV_INT8 };

template <class Body> auto with_kv(int32_t type, const Body& body) {
    switch (type) {
        case KV_BF16: return body(Bf16());
        case KV_F32: return body(F32());
        case KV_FP16: return body(Fp16());
        default: return body(Int8());
    }
}

// One number of a page as an operand.
template <class K, class T> INLINE typename T::Stored as_operand(typename K::Stored x) {
    if constexpr (std::is_same_v<K, T>) return x;
    else return T::round(K::widen(x));
}

// W lanes of a page as rows of W operand lanes, `stride` lanes apart: one, or two where a lane of K is a pair and T's is not.
template <class K, class T> INLINE void unpack(const typename K::Stored* from, uint32_t* to, int64_t stride) {
    const auto row = [&](int n) { return reinterpret_cast<float*>(to + n * stride); };
    if constexpr (std::is_same_v<K, Int8> && std::is_same_v<T, Bf16>) {
        store_pairs(to, from);
    } else if constexpr (std::is_same_v<K, Int8>) {
        store(row(0), load_first(from));
        store(row(1), load_second(from));
    } else if constexpr (std::is_same_v<K, Bf16>) {
        const vi pairs = load_lanes(reinterpret_cast<const uint32_t*>(from));
        store(row(0), as_float(left<16>(pairs)));
        store(row(1), as_float(and_lanes(pairs, set1_lanes(0xffff0000u))));
    } else {
        store(row(0), K::load_wide(from));
    }
}

// Codes of `n` numbers and their scale: the largest magnitude / 127. Numbers so small that the scale
// would be subnormal become 0; one that is infinite or none makes the scale NaN, and every score with it.
INLINE float quantize(const float* from, int n, int8_t* to) {
    vf most = set1(0.0f), broken = set1(0.0f);
    int d = 0;
    for (; d + W <= n; d += W) {
        const vf x = load(from + d);
        most = max(most, as_float(and_lanes(as_lanes(x), set1_lanes(0x7fffffff))));
        broken = add(broken, sub(x, x));
    }
    float largest = max_lanes(most), poison = sum_lanes(broken);
    for (; d < n; ++d) {
        largest = std::fabs(from[d]) > largest ? std::fabs(from[d]) : largest;
        poison += from[d] - from[d];
    }
    const float scale = largest / 127.0f;
    if (poison != 0.0f || !(scale >= std::numeric_limits<float>::min())) {
        std::memset(to, 0, static_cast<size_t>(n));
        return poison != 0.0f ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    }
    float codes[W];
    for (d = 0; d + W <= n; d += W) {
        store(codes, nearest(div(load(from + d), set1(scale))));
        UNROLL for (int i = 0; i < W; ++i) to[d + i] = static_cast<int8_t>(codes[i]);
    }
    for (; d < n; ++d) to[d] = static_cast<int8_t>(std::nearbyint(from[d] / scale));
    return scale;
}

// `n` numbers in K; NaN where K has no finite number for one. An infinite key would give scores of
// minus infinity to half of all queries, and so vanish without a trace.
template <class K> INLINE void round_or_nan(const float* from, int n, typename K::Stored* to) {
    int d = 0;
    for (; d + W <= n; d += W) {
        K::store_round(to + d, load(from + d));
        const vf kept = K::load_wide(to + d);
        K::store_round(to + d, sub(load(from + d), sub(kept, kept)));
    }
    for (; d < n; ++d) {
        const float kept = K::widen(K::round(from[d]));
        to[d] = K::round(from[d] - (kept - kept));
    }
}

// One token's K or V of one head as a step in S keeps it in pages of K. Returns its scale, if any.
template <class S, class K> INLINE float keep(const float* from, int n, typename K::Stored* to) {
    if constexpr (SCALED<K>) return quantize(from, n, to);
    else if constexpr (std::is_same_v<S, K>) round_row<K>(from, n, to);
    else round_or_nan<K>(from, n, to);
    return 0.0f;
}

}  // namespace agentserve
