// Codes and scales of packed panels as a product's operands.
#pragma once

#include <bit>

#include "codes.h"
#include "vec_narrow.h"

namespace agentserve {

template <int CENTRE> constexpr uint16_t bf16_code(uint32_t code) {
    return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(code) - CENTRE)) >> 16);
}

#if defined(__AVX512F__)

// A table look-up takes only the low bits of its index, so whatever stands above a code needs no
// masking.

INLINE __m512i load_line(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE void store_line(void* p, __m512i a) { _mm512_storeu_si512(p, a); }

// bfloat16 codes by index; fewer than 64 repeat.
template <class F> struct CodeTable {
    alignas(64) uint16_t at[64];
    constexpr CodeTable() : at() {
        for (uint32_t i = 0; i < 64; ++i) at[i] = bf16_code<F::CENTRE>(i & ((1u << (F::BITS & 7)) - 1));
    }
};

// Bits [shift, ...) of each box of SIZE bytes moved to bit `to`.
template <int SIZE> INLINE __m512i move_bits(__m512i a, int shift, int to) {
    if (shift == to) return a;
    if constexpr (SIZE == 4) return shift > to ? _mm512_srli_epi32(a, shift - to) : _mm512_slli_epi32(a, to - shift);
    return shift > to ? _mm512_srli_epi16(a, shift - to) : _mm512_slli_epi16(a, to - shift);
}

// Vector `vector` of a unit as whole numbers: the code in the low BITS bits of each box, above it anything.
template <class F, int SIZE> INLINE __m512i raw_codes(const uint8_t* from, int vector) {
    constexpr int N = 64 / SIZE;
    const BoxPlace l = box_place<SIZE, 4>(vector * N);
    const __m512i low = move_bits<SIZE>(load_line(from + l.box * SIZE), l.shift, 0);
    if constexpr (F::HIGH == 0) {
        return low;
    } else {
        const BoxPlace h = box_place<SIZE, F::HIGH>(vector * N);
        const __m512i high = move_bits<SIZE>(load_line(from + NIBBLE_BYTES + h.box * SIZE), h.shift, 4);
        const __m512i nibble = SIZE == 4 ? _mm512_set1_epi32(15) : SIZE == 2 ? _mm512_set1_epi16(15) : _mm512_set1_epi8(15);
        return _mm512_ternarylogic_epi32(nibble, low, high, 0xca);  // nibble ? low : high
    }
}

INLINE __m256i narrow_exact(__m512 a) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(a), 16)); }

template <int CENTRE> INLINE __m512 widen_codes(const uint8_t* from) {
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(CENTRE)));
}

template <class F> INLINE void unpack_codes(const uint8_t* from, uint16_t* to) {
    if constexpr (F::BITS == 8) {
        UNROLL for (int i = 0; i < UNIT_CODES; i += 32) {
            const __m512 low = widen_codes<F::CENTRE>(from + i), high = widen_codes<F::CENTRE>(from + i + 16);
#if defined(__AVX512BF16__)
            store_line(to + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
#else
            store_line(to + i, _mm512_inserti64x4(_mm512_castsi256_si512(narrow_exact(low)), narrow_exact(high), 1));
#endif
        }
    } else {
        static constexpr CodeTable<F> table;
        const __m512i first = _mm512_load_si512(table.at), second = _mm512_load_si512(table.at + 32);
        UNROLL for (int vector = 0; vector < UNIT_CODES / 32; ++vector) {
            const __m512i code = raw_codes<F, 2>(from, vector);
            store_line(to + 32 * vector, F::BITS == 6 ? _mm512_permutex2var_epi16(first, code, second)
                                                      : _mm512_permutexvar_epi16(code, first));
        }
    }
}

template <class F> INLINE void unpack_codes(const uint8_t* from, float* to) {
    if constexpr (F::BITS == 8) {
        UNROLL for (int i = 0; i < UNIT_CODES; i += 16)
            store(to + i, widen_codes<F::CENTRE>(from + i));
    } else {
        const __m512i mask = _mm512_set1_epi32((1 << F::BITS) - 1), centre = _mm512_set1_epi32(F::CENTRE);
        UNROLL for (int line = 0; line < 8; ++line) UNROLL for (int v = 0; v < 8; ++v) {
            const int vector = line * 8 + v;
            const __m512i code = _mm512_and_si512(raw_codes<F, 4>(from, vector), mask);
            store(to + 16 * vector, _mm512_cvtepi32_ps(_mm512_sub_epi32(code, centre)));
        }
    }
}

template <class F> INLINE void unpack_codes(const uint8_t* from, int8_t* to) {
    const __m512i mask = _mm512_set1_epi8(static_cast<char>((1 << F::BITS) - 1)), centre = _mm512_set1_epi8(static_cast<char>(F::CENTRE));
    UNROLL for (int vector = 0; vector < UNIT_CODES / 64; ++vector) {
        const __m512i code = F::BITS == 8 ? load_line(from + 64 * vector) : _mm512_and_si512(raw_codes<F, 1>(from, vector), mask);
        store_line(to + 64 * vector, F::CENTRE ? _mm512_sub_epi8(code, centre) : code);
    }
}

#else

template <int CENTRE> INLINE void as_operand(uint32_t code, int8_t& to) {
    to = static_cast<int8_t>(static_cast<int32_t>(code) - CENTRE);
}
template <int CENTRE> INLINE void as_operand(uint32_t code, float& to) {
    to = static_cast<float>(static_cast<int32_t>(code) - CENTRE);
}
template <int CENTRE> INLINE void as_operand(uint32_t code, uint16_t& to) { to = bf16_code<CENTRE>(code); }

template <class Code> struct BoxOf { using Type = Code; };
template <> struct BoxOf<float> { using Type = uint32_t; };
template <> struct BoxOf<int8_t> { using Type = uint8_t; };

template <class F, class Code> INLINE void unpack_codes(const uint8_t* from, Code* to) {
    using Box = typename BoxOf<Code>::Type;
    constexpr int SIZE = sizeof(Code), N = 64 / SIZE;
    if constexpr (F::BITS == 8) {
        for (int i = 0; i < UNIT_CODES; ++i) as_operand<F::CENTRE>(from[i], to[i]);
    } else {
        Box low[N], high[N];
        for (int vector = 0; vector < UNIT_CODES / N; ++vector, to += N) {
            const BoxPlace l = box_place<SIZE, 4>(vector * N);
            std::memcpy(low, from + l.box * SIZE, sizeof low);
            if constexpr (F::HIGH == 0) {
                for (int i = 0; i < N; ++i) as_operand<F::CENTRE>(low[i] >> l.shift & 15u, to[i]);
            } else {
                const BoxPlace h = box_place<SIZE, F::HIGH>(vector * N);
                std::memcpy(high, from + NIBBLE_BYTES + h.box * SIZE, sizeof high);
                constexpr uint32_t MASK = (1u << F::HIGH) - 1;
                for (int i = 0; i < N; ++i)
                    as_operand<F::CENTRE>((low[i] >> l.shift & 15u) | (high[i] >> h.shift & MASK) << 4, to[i]);
            }
        }
    }
}

#endif

// PANEL halves.
INLINE void load_halves(const uint8_t* from, float* to) {
    for (int c = 0; c < PANEL; c += W) store(to + c, load_fp16(reinterpret_cast<const uint16_t*>(from) + c));
}

// A unit's scales `[GROUPS][PANEL]` and offsets `[PANEL]`.
template <class F> INLINE void unpack_scales(const uint8_t* head, const uint8_t* unit, float (*scale)[PANEL], float* offset) {
    if constexpr (F::SUPER) {
        float d[PANEL];
        load_halves(head, d);
        for (int g = 0; g < F::GROUPS; ++g)
            for (int c = 0; c < PANEL; ++c) {
                const uint8_t s = unit[g * PANEL + c];  // signed where there are no offsets
                scale[g][c] = d[c] * (F::OFFSET ? static_cast<float>(s) : static_cast<float>(static_cast<int8_t>(s)));
            }
        if constexpr (F::OFFSET) {
            load_halves(head + 2 * PANEL, d);
            for (int c = 0; c < PANEL; ++c) offset[c] = -(d[c] * static_cast<float>(unit[F::GROUPS * PANEL + c]));
        }
    } else {
        load_halves(unit, scale[0]);
        if constexpr (F::OFFSET) load_halves(unit + 2 * PANEL, offset);
    }
}

}  // namespace agentserve
