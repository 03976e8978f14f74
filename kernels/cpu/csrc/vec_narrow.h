// Vectors of fp16 numbers and of 8-bit codes, beside the bfloat16 ones of vec.h.
#pragma once

#include "vec.h"

namespace agentserve {

#if defined(__AVX512F__)

INLINE vf load_fp16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
INLINE void store_fp16(uint16_t* p, vf a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
template <int N> INLINE vi right_signed(vi a) { return _mm512_srai_epi32(a, N); }
INLINE vi or_lanes(vi a, vi b) { return _mm512_or_si512(a, b); }

#elif defined(__AVX2__)

INLINE vf load_fp16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
INLINE void store_fp16(uint16_t* p, vf a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
template <int N> INLINE vi right_signed(vi a) { return _mm256_srai_epi32(a, N); }
INLINE vi or_lanes(vi a, vi b) { return _mm256_or_si256(a, b); }

#else

template <int N> INLINE vi right_signed(vi a) { return a >> N; }
INLINE vi or_lanes(vi a, vi b) { return a | b; }

// 2^-14 is the smallest normal fp16; below it numbers are multiples of 2^-24.
INLINE vf load_fp16(const uint16_t* p) {
    vi a;
    UNROLL for (int i = 0; i < W; ++i) a[i] = p[i];
    const vi magnitude = left<13>(and_lanes(a, set1_lanes(0x7fff)));
    const vf scaled = mul(as_float(magnitude), set1(0x1p112f));  // moves the exponent, and subnormals with it
    const vi special = and_lanes(a, set1_lanes(0x7c00)) == set1_lanes(0x7c00);
    const vi bits = (special & (magnitude | set1_lanes(0x7f800000))) | (~special & as_lanes(scaled));
    return as_float(bits | left<16>(and_lanes(a, set1_lanes(0x8000))));
}
INLINE void store_fp16(uint16_t* p, vf a) {
    const vi sign = and_lanes(right<16>(as_lanes(a)), set1_lanes(0x8000));
    const vi bits = and_lanes(as_lanes(a), set1_lanes(0x7fffffff));
    const vf x = as_float(bits);
    // Adding 0.5 rounds to multiples of 2^-24 (nearest even), which end up as the sum's lowest bits.
    const vi small = as_lanes(add(x, set1(0.5f))) - as_lanes(set1(0.5f));
    const vi odd = and_lanes(right<13>(bits), set1_lanes(1));
    const vi normal = right<13>(bits + set1_lanes(0xfff) + odd) - set1_lanes(112 << 10);
    const vi is_small = x < set1(0x1p-14f), is_large = x >= set1(65520.0f), is_nan = x != x;
    vi half = (is_small & small) | (~is_small & normal);
    half = (is_large & set1_lanes(0x7c00)) | (~is_large & half);
    half = (is_nan & set1_lanes(0x7e00)) | (~is_nan & half);
    UNROLL for (int i = 0; i < W; ++i) p[i] = static_cast<uint16_t>(half[i] | sign[i]);
}

#endif

// W pairs of codes: the first and the second of each, as numbers.
INLINE vf load_first(const int8_t* p) {
    return to_float(right_signed<24>(left<8>(as_lanes(load_bf16(reinterpret_cast<const uint16_t*>(p))))));
}
INLINE vf load_second(const int8_t* p) {
    return to_float(right_signed<24>(as_lanes(load_bf16(reinterpret_cast<const uint16_t*>(p)))));
}

// W pairs of codes as lanes of two bfloat16 values, which hold them exactly: the floats' upper halves.
INLINE vi load_pairs(const int8_t* p) {
#if defined(__AVX512F__)
    const auto half = [&](int n) {
        return as_lanes(to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + n))));
    };
    const vi fours = left<2>(iota());
    const vi upper = add_lanes(add_lanes(fours, left<16>(fours)), set1_lanes(0x00030001));  // 16-bit halves 1, 3, 5, ...
    return _mm512_permutex2var_epi16(half(0), upper, half(1));
#else
    const vi first = right<16>(as_lanes(load_first(p)));
    return or_lanes(first, and_lanes(as_lanes(load_second(p)), set1_lanes(0xffff0000u)));
#endif
}

}  // namespace agentserve
