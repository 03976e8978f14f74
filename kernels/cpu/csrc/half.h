// IEEE half-precision numbers, read only.
#pragma once

#include <bit>

#include "vec.h"

namespace agentserve {

INLINE float widen_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, exponent = half >> 10 & 31u, part = half & 0x3ffu;
    uint32_t bits = sign | (exponent + 112) << 23 | part << 13;
    if (exponent == 31) bits = sign | 0x7f800000u | part << 13;
    return exponent ? std::bit_cast<float>(bits) : static_cast<float>(part) * (sign ? -0x1p-24f : 0x1p-24f);
}

// 32 halves at any address.
INLINE void load_halves(const uint8_t* from, float* to) {
#if defined(__AVX512F__)
    for (int c = 0; c < 32; c += W)
        store(to + c, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * c))));
#elif defined(__F16C__) && defined(__AVX2__)
    for (int c = 0; c < 32; c += W)
        store(to + c, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * c))));
#else
    uint16_t half[32];
    std::memcpy(half, from, sizeof half);
    for (int c = 0; c < 32; ++c) to[c] = widen_half(half[c]);
#endif
}

}  // namespace agentserve
