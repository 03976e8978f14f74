// One vector of float lanes per instruction set; everything above is written once in these terms.
//
// The library is compiled with -ffp-contract=off: a product is fused with a sum where `fma` or
// `dot2` says so and nowhere else. Otherwise a compiler's choice would decide a row's bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

namespace agentserve {

#if defined(__AVX512F__)

constexpr int W = 16;
using vf = __m512;
using vi = __m512i;

INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
INLINE vi load_lanes(const uint32_t* p) { return _mm512_loadu_si512(p); }
INLINE void store(float* p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf set1(float a) { return _mm512_set1_ps(a); }
INLINE vi set1_lanes(uint32_t a) { return _mm512_set1_epi32(static_cast<int>(a)); }
INLINE vi iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE vf as_float(vi a) { return _mm512_castsi512_ps(a); }
INLINE vi as_lanes(vf a) { return _mm512_castps_si512(a); }
INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf nearest(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vi to_int(vf a) { return _mm512_cvtps_epi32(a); }
INLINE vi add_lanes(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi and_lanes(vi a, vi b) { return _mm512_and_si512(a, b); }
INLINE vi sub_lanes(vi a, vi b) { return _mm512_sub_epi32(a, b); }
INLINE void store_ints(int32_t* p, vi a) { _mm512_storeu_si512(p, a); }
INLINE vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vi max_bits(vi a, vi b) { return _mm512_max_epi32(a, b); }
INLINE int32_t sum_ints(vi a) { return _mm512_reduce_add_epi32(a); }
INLINE void store_bytes(uint8_t* p, vi a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a)); }
// sum + the four products of unsigned bytes of x and signed bytes of w in each lane.
INLINE vi dot_bytes(vi sum, vi x, vi w) {
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(sum, x, w);
#else
    const vi even = _mm512_madd_epi16(_mm512_and_si512(x, _mm512_set1_epi16(255)), _mm512_srai_epi16(_mm512_slli_epi16(w, 8), 8));
    const vi odd = _mm512_madd_epi16(_mm512_srli_epi16(x, 8), _mm512_srai_epi16(w, 8));
    return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
#endif
}
template <int N> INLINE vi left(vi a) { return _mm512_slli_epi32(a, N); }
template <int N> INLINE vi right(vi a) { return _mm512_srli_epi32(a, N); }
// Lane i of the result: a where low <= index < high, else b.
INLINE vf in_range(vi index, vi low, vi high, vf a, vf b) {
    const __mmask16 m = _mm512_cmp_epi32_mask(index, low, _MM_CMPINT_NLT) & _mm512_cmp_epi32_mask(index, high, _MM_CMPINT_LT);
    return _mm512_mask_blend_ps(m, b, a);
}
// a where x >= bound (or x is no number), else 0.
INLINE vf zero_below(vf x, vf bound, vf a) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, bound, _CMP_NLT_UQ), a);
}
// Lane i of the result: a where x > y, else b.
INLINE vi where_greater(vf x, vf y, vi a, vi b) {
    return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, y, _CMP_GT_OQ), b, a);
}
// W bfloat16 values, widened, and back (nearest even).
INLINE vf load_bf16(const uint16_t* p) {
    return as_float(left<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
}
INLINE vi narrow_lanes(vf a);
INLINE void store_bf16(uint16_t* p, vf a) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a));
#else
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(narrow_lanes(a)));
#endif
}
INLINE vf keep_nan(vf x, vf rounded) { return _mm512_mask_mov_ps(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x); }

#elif defined(__AVX2__)

constexpr int W = 8;
using vf = __m256;
using vi = __m256i;

INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
INLINE vi load_lanes(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
INLINE void store(float* p, vf a) { _mm256_storeu_ps(p, a); }
INLINE vf set1(float a) { return _mm256_set1_ps(a); }
INLINE vi set1_lanes(uint32_t a) { return _mm256_set1_epi32(static_cast<int>(a)); }
INLINE vi iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
INLINE vf as_float(vi a) { return _mm256_castsi256_ps(a); }
INLINE vi as_lanes(vf a) { return _mm256_castps_si256(a); }
INLINE vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf nearest(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vi to_int(vf a) { return _mm256_cvtps_epi32(a); }
INLINE vi add_lanes(vi a, vi b) { return _mm256_add_epi32(a, b); }
INLINE vi and_lanes(vi a, vi b) { return _mm256_and_si256(a, b); }
INLINE vi sub_lanes(vi a, vi b) { return _mm256_sub_epi32(a, b); }
INLINE void store_ints(int32_t* p, vi a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
INLINE vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
INLINE vi max_bits(vi a, vi b) { return _mm256_max_epi32(a, b); }
INLINE vi dot_bytes(vi sum, vi x, vi w) {
    const vi even = _mm256_madd_epi16(_mm256_and_si256(x, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8));
    const vi odd = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(w, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
template <int N> INLINE vi left(vi a) { return _mm256_slli_epi32(a, N); }
template <int N> INLINE vi right(vi a) { return _mm256_srli_epi32(a, N); }
INLINE vf in_range(vi index, vi low, vi high, vf a, vf b) {
    const vi outside = _mm256_or_si256(_mm256_cmpgt_epi32(low, index),
                                       _mm256_xor_si256(_mm256_cmpgt_epi32(high, index), _mm256_set1_epi32(-1)));
    return _mm256_blendv_ps(a, b, as_float(outside));
}
INLINE vf zero_below(vf x, vf bound, vf a) { return _mm256_and_ps(_mm256_cmp_ps(x, bound, _CMP_NLT_UQ), a); }
INLINE vi where_greater(vf x, vf y, vi a, vi b) {
    return as_lanes(_mm256_blendv_ps(as_float(b), as_float(a), _mm256_cmp_ps(x, y, _CMP_GT_OQ)));
}
INLINE vf load_bf16(const uint16_t* p) {
    return as_float(left<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
}
INLINE vi narrow_lanes(vf a);
INLINE void store_bf16(uint16_t* p, vf a) {
    const vi n = narrow_lanes(a);
    const vi packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(n, n), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
INLINE vf keep_nan(vf x, vf rounded) { return _mm256_blendv_ps(rounded, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }

#else  // any other machine with GCC or Clang vectors (NEON, SSE2, ...)

constexpr int W = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));

INLINE vf load(const float* p) { vf a; std::memcpy(&a, p, sizeof a); return a; }
INLINE vi load_lanes(const uint32_t* p) { vi a; std::memcpy(&a, p, sizeof a); return a; }
INLINE void store(float* p, vf a) { std::memcpy(p, &a, sizeof a); }
INLINE vf set1(float a) { return vf{a, a, a, a}; }
INLINE vi set1_lanes(uint32_t a) { const int32_t b = static_cast<int32_t>(a); return vi{b, b, b, b}; }
INLINE vi iota() { return vi{0, 1, 2, 3}; }
INLINE vf as_float(vi a) { return reinterpret_cast<vf>(a); }
INLINE vi as_lanes(vf a) { return reinterpret_cast<vi>(a); }
INLINE vf add(vf a, vf b) { return a + b; }
INLINE vf sub(vf a, vf b) { return a - b; }
INLINE vf mul(vf a, vf b) { return a * b; }
INLINE vf div(vf a, vf b) { return a / b; }
INLINE vf choose(vi m, vf a, vf b) { return as_float((m & as_lanes(a)) | (~m & as_lanes(b))); }
INLINE vf max(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf min(vf a, vf b) { return choose(a < b, a, b); }
INLINE vf fma(vf a, vf b, vf c) {
    vf r;
    UNROLL for (int i = 0; i < W; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
}
INLINE vf nearest(vf a) {
    vf r;
    UNROLL for (int i = 0; i < W; ++i) r[i] = __builtin_nearbyintf(a[i]);
    return r;
}
INLINE vi to_int(vf a) { return __builtin_convertvector(a, vi); }
INLINE vi add_lanes(vi a, vi b) { return reinterpret_cast<vi>(reinterpret_cast<vu>(a) + reinterpret_cast<vu>(b)); }
INLINE vi and_lanes(vi a, vi b) { return a & b; }
INLINE vi sub_lanes(vi a, vi b) { return a - b; }
INLINE void store_ints(int32_t* p, vi a) { std::memcpy(p, &a, sizeof a); }
INLINE vf to_float(vi a) { return __builtin_convertvector(a, vf); }
INLINE vi max_bits(vi a, vi b) { const vi m = a > b; return (m & a) | (~m & b); }
INLINE vi dot_bytes(vi sum, vi x, vi w) {
    UNROLL for (int shift = 0; shift < 32; shift += 8) sum += (x >> shift & 255) * (w << (24 - shift) >> 24);
    return sum;
}
template <int N> INLINE vi left(vi a) { return reinterpret_cast<vi>(reinterpret_cast<vu>(a) << N); }
template <int N> INLINE vi right(vi a) { return reinterpret_cast<vi>(reinterpret_cast<vu>(a) >> N); }
INLINE vf in_range(vi index, vi low, vi high, vf a, vf b) { return choose((index >= low) & (index < high), a, b); }
INLINE vf zero_below(vf x, vf bound, vf a) { return choose(~(x < bound), a, set1(0.0f)); }
INLINE vi where_greater(vf x, vf y, vi a, vi b) { const vi m = x > y; return (m & a) | (~m & b); }
INLINE vf load_bf16(const uint16_t* p) {
    vi a;
    UNROLL for (int i = 0; i < W; ++i) a[i] = p[i] << 16;
    return as_float(a);
}
INLINE vi narrow_lanes(vf a);
INLINE void store_bf16(uint16_t* p, vf a) {
    const vi n = narrow_lanes(a);
    UNROLL for (int i = 0; i < W; ++i) p[i] = static_cast<uint16_t>(n[i]);
}
INLINE vf keep_nan(vf x, vf rounded) { return choose(x == x, rounded, x); }

#endif

// Upper halves rounded to nearest even, in the low 16 bits of each lane; a NaN stays one.
INLINE vi narrow_lanes(vf a) {
    const vi x = as_lanes(a);
    const vi odd = and_lanes(right<16>(x), set1_lanes(1));
    const vi rounded = add_lanes(x, add_lanes(odd, set1_lanes(0x7fff)));
    return right<16>(as_lanes(keep_nan(a, as_float(rounded))));
}

// Numbers without sign as whole ones: the same order, NaN above all.
INLINE vi magnitude(vf a) { return and_lanes(as_lanes(a), set1_lanes(0x7fffffff)); }

// The largest lane as the number that it is the magnitude of.
INLINE float max_bits_of(vi a) {
#if defined(__AVX512F__)
    const int32_t m = _mm512_reduce_max_epi32(a);
#else
    int32_t x[W];
    std::memcpy(x, &a, sizeof x);
    int32_t m = x[0];
    UNROLL for (int i = 1; i < W; ++i) m = x[i] > m ? x[i] : m;
#endif
    float most;
    std::memcpy(&most, &m, sizeof most);
    return most;
}

#if !defined(__AVX512F__)
INLINE int32_t sum_ints(vi a) {
    uint32_t x[W], sum = 0;  // wraps around, as vectors do
    std::memcpy(x, &a, sizeof x);
    UNROLL for (int i = 0; i < W; ++i) sum += x[i];
    return static_cast<int32_t>(sum);
}
// The low byte of each lane.
INLINE void store_bytes(uint8_t* p, vi a) {
    int32_t x[W];
    std::memcpy(x, &a, sizeof x);
    UNROLL for (int i = 0; i < W; ++i) p[i] = static_cast<uint8_t>(x[i]);
}
#endif

// The sum of a vector's lanes, always added in the same tree.
INLINE float sum_lanes(vf a) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(a);  // the tree below
#else
    float x[W];
    store(x, a);
    UNROLL for (int half = W / 2; half > 0; half /= 2)
        UNROLL for (int i = 0; i < half; ++i) x[i] += x[i + half];
    return x[0];
#endif
}

INLINE float max_lanes(vf a) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(a);
#else
    float x[W];
    store(x, a);
    float m = x[0];
    UNROLL for (int i = 1; i < W; ++i) m = x[i] > m ? x[i] : m;
    return m;
#endif
}

// 2^f for 0 <= f <= 1, exactly 1 at 0: minimax polynomials, their relative error below 1e-7 and 3e-6.
struct Exact {
    static INLINE vf power(vf f) {
        vf y = fma(f, set1(1.8671301659e-3f), set1(9.0170297772e-3f));
        y = fma(y, f, set1(5.5799912661e-2f));
        y = fma(y, f, set1(2.4016444385e-1f));
        y = fma(y, f, set1(6.9315129519e-1f));
        return fma(y, f, set1(1.0f));
    }
};
struct Short {
    static INLINE vf power(vf f) {
        vf y = fma(f, set1(1.3426684774e-2f), set1(5.2242472768e-2f));
        y = fma(y, f, set1(2.4128019810e-1f));
        y = fma(y, f, set1(6.9304484129e-1f));
        return fma(y, f, set1(1.0f));
    }
};

// 2^x for x <= 127; exactly 0 far below -126 (where numbers get too small, not later than -150).
template <class P = Exact> INLINE vf exp2(vf x) {
#if defined(__AVX512F__)
    const vf bounded = max(set1(-200.0f), x);  // in this order a NaN stays one
    const vf fraction = _mm512_reduce_ps(bounded, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    return _mm512_scalef_ps(P::power(fraction), bounded);  // times 2^floor
#else
    const vf below = nearest(sub(max(x, set1(-126.0f)), set1(0.5f)));
    const vf scale = as_float(left<23>(add_lanes(to_int(below), set1_lanes(127))));
    return zero_below(x, set1(-126.0f), mul(P::power(sub(x, below)), scale));
#endif
}

INLINE float exp2_one(float x) {
    float y[W];
    store(y, exp2(set1(x)));
    return y[0];
}

}  // namespace agentserve
