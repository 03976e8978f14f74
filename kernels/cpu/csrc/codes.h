// Block formats: what a packed panel holds, and how its codes become operands of a product.
//
// weight = scale * code + offset, with `code` exact in every operand type. Along k a panel is a
// sequence of units, each 32 weights of 32 outputs: scales, then codes. Formats with a scale of
// scales per 256 weights have it (and the offsets' scale) in front of every eight units.
//
// The 1,024 codes of a unit are numbered as the operand type lays them out (`place`), in vectors of
// 64 bytes of operands. Their low four bits are kept in boxes as wide as an operand: box i of a
// 64-byte line has element i of 2, 4 or 8 vectors, one nibble each, so that a shift and a table
// turn the line into vectors. Bits 4 and 5 lie in planes behind them, by the same rule.
#pragma once

#include "panels.h"

namespace agentserve {

constexpr int UNIT_CODES = UNIT * PANEL;
constexpr int SUPER_UNITS = 8;
constexpr int NIBBLE_BYTES = UNIT_CODES / 2;

// `BITS` of a code; `CENTRE`: what is subtracted from it; `OFFSET`: weights have one; `SUPER`: scales
// are whole numbers times a number per 256 weights; `GROUPS`: scales of one output per unit;
// `BYTES` of a block in a file.
template <int BITS_, int CENTRE_, bool OFFSET_, bool SUPER_, int GROUPS_, int BYTES_> struct BlockFormat {
    static constexpr int BITS = BITS_, CENTRE = CENTRE_, GROUPS = GROUPS_, BYTES = BYTES_;
    static constexpr bool OFFSET = OFFSET_, SUPER = SUPER_;
    static constexpr int HIGH = BITS == 8 ? 0 : BITS - 4;  // bits in planes
    static constexpr int HEAD = SUPER ? PANEL * 2 * (1 + OFFSET) : 0;
    static constexpr int SCALES = SUPER ? PANEL * (GROUPS + OFFSET) : PANEL * 2 * (1 + OFFSET);
    static constexpr int UNIT_BYTES = SCALES + UNIT_CODES * BITS / 8;
    static constexpr int FILE_UNITS = SUPER ? SUPER_UNITS : 1;  // units of a block in a file

    static int64_t head_at(int64_t unit) { return SUPER ? unit / SUPER_UNITS * (HEAD + SUPER_UNITS * UNIT_BYTES) : 0; }
    static int64_t unit_at(int64_t unit) {
        return SUPER ? head_at(unit) + HEAD + unit % SUPER_UNITS * UNIT_BYTES : unit * UNIT_BYTES;
    }
    static int64_t panel_bytes(int64_t units) { return units * UNIT_BYTES + units / FILE_UNITS * HEAD; }
};

using FormatQ4_0 = BlockFormat<4, 8, false, false, 1, 18>;
using FormatQ4_1 = BlockFormat<4, 0, true, false, 1, 20>;
using FormatQ5_0 = BlockFormat<5, 16, false, false, 1, 22>;
using FormatQ5_1 = BlockFormat<5, 0, true, false, 1, 24>;
using FormatQ8_0 = BlockFormat<8, 128, false, false, 1, 34>;
using FormatQ4_K = BlockFormat<4, 0, true, true, 1, 144>;
using FormatQ5_K = BlockFormat<5, 0, true, true, 1, 176>;
using FormatQ6_K = BlockFormat<6, 32, false, true, 2, 210>;

template <class Body> auto with_format(int32_t format, const Body& body) {
    switch (format) {
        case Q4_0: return body(FormatQ4_0());
        case Q4_1: return body(FormatQ4_1());
        case Q5_0: return body(FormatQ5_0());
        case Q5_1: return body(FormatQ5_1());
        case Q8_0: return body(FormatQ8_0());
        case Q4_K: return body(FormatQ4_K());
        case Q5_K: return body(FormatQ5_K());
        default: return body(FormatQ6_K());
    }
}

// Where the code of output c at position k of a unit stands, for operands of `lane` per 32-bit lane.
constexpr int place(int lane, int k, int c) { return k / lane * PANEL * lane + c * lane + k % lane; }

// Where `BITS` bits of code `at` are, in boxes of `SIZE` bytes: box number and shift.
struct BoxPlace {
    int box, shift;
};
template <int SIZE, int BITS> constexpr BoxPlace box_place(int at) {
    constexpr int N = 64 / SIZE, PER_LINE = 8 * SIZE / BITS;  // elements of a vector, vectors of a line
    const int vector = at / N;
    return {vector / PER_LINE * N + at % N, vector % PER_LINE * BITS};
}

}  // namespace agentserve
