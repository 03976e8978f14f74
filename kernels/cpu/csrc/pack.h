// Packing weights into panels.
#pragma once

#include "codes.h"
#include "team.h"

namespace agentserve {

// Packs row-major `w [n][k]`; `pair_halves`: n is 2 * inner, gates then ups (see GateUp).
template <class T>
void pack(Team& team, const typename T::Stored* w, int64_t n, int64_t k, bool pair_halves, uint32_t* panels) {
    const int64_t steps = (k + T::PAIR - 1) / T::PAIR, half = PANEL / 2, inner = n / 2;
    const int64_t count = pair_halves ? (inner + half - 1) / half : (n + PANEL - 1) / PANEL;
    team.each(count, 1, [&](int64_t panel) {
        auto* to = reinterpret_cast<typename T::Stored*>(panels + panel * steps * PANEL);
        for (int64_t c = 0; c < PANEL; ++c) {
            int64_t row = panel * PANEL + c;
            bool there = row < n;
            if (pair_halves) {
                const int64_t unit = panel * half + c % half;
                there = unit < inner;
                row = c < half ? unit : inner + unit;
            }
            for (int64_t i = 0; i < steps * T::PAIR; ++i)
                to[(i / T::PAIR * PANEL + c) * T::PAIR + i % T::PAIR] = there && i < k ? w[row * k + i] : typename T::Stored(0);
        }
    });
}

// One unit of one row as a file has it: codes with their centre still in them, and what scales them.
struct FileUnit {
    uint8_t codes[UNIT];
    uint16_t scale, offset;            // halves; of the whole block where `parts` count
    uint8_t scale_parts[2], offset_part;
};

INLINE uint16_t half_at(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, sizeof half);
    return half;
}

// GGML's formats (ggml-common.h, ggml-quants.c). `unit` of the row that begins at `row`.
template <class F> FileUnit read_unit(const uint8_t* row, int64_t unit) {
    FileUnit to{};
    const uint8_t* block = row + unit / F::FILE_UNITS * F::BYTES;
    const int part = static_cast<int>(unit % F::FILE_UNITS);
    if constexpr (F::BITS == 8) {
        to.scale = half_at(block);
        for (int i = 0; i < UNIT; ++i) to.codes[i] = static_cast<uint8_t>(block[2 + i] ^ 0x80);
    } else if constexpr (!F::SUPER) {
        constexpr int SCALES = 2 * (1 + F::OFFSET);
        to.scale = half_at(block);
        if constexpr (F::OFFSET) to.offset = half_at(block + 2);
        const uint8_t *high = block + SCALES, *low = high + (F::HIGH ? 4 : 0);
        for (int i = 0; i < UNIT; ++i) {
            to.codes[i] = i < 16 ? low[i] & 15 : low[i - 16] >> 4;
            if constexpr (F::HIGH) to.codes[i] |= static_cast<uint8_t>((high[i / 8] >> i % 8 & 1) << 4);
        }
    } else if constexpr (F::OFFSET) {
        to.scale = half_at(block);
        to.offset = half_at(block + 2);
        const uint8_t* six = block + 4;  // scales and minima in six bits each
        if (part < 4) {
            to.scale_parts[0] = six[part] & 63;
            to.offset_part = six[part + 4] & 63;
        } else {
            to.scale_parts[0] = static_cast<uint8_t>((six[part + 4] & 15) | six[part - 4] >> 6 << 4);
            to.offset_part = static_cast<uint8_t>(six[part + 4] >> 4 | six[part] >> 6 << 4);
        }
        const uint8_t *high = block + 16, *low = high + (F::HIGH ? 32 : 0) + part / 2 * 32;
        for (int i = 0; i < UNIT; ++i) {
            to.codes[i] = low[i] >> part % 2 * 4 & 15;
            if constexpr (F::HIGH) to.codes[i] |= static_cast<uint8_t>((high[i] >> part & 1) << 4);
        }
    } else {
        const int half = part / 4, quarter = part % 4;
        const uint8_t *low = block + 64 * half + 32 * (quarter % 2), *high = block + 128 + 32 * half, *scales = block + 192;
        for (int i = 0; i < UNIT; ++i)
            to.codes[i] = static_cast<uint8_t>((low[i] >> quarter / 2 * 4 & 15) | (high[i] >> 2 * quarter & 3) << 4);
        to.scale_parts[0] = scales[2 * part];
        to.scale_parts[1] = scales[2 * part + 1];
        to.scale = half_at(block + 208);
    }
    return to;
}

INLINE void put_half(uint8_t* to, int c, uint16_t half) { std::memcpy(to + 2 * c, &half, sizeof half); }

// Codes of `BITS` bits of a unit, numbered as operands of `LANE` per lane, into boxes.
template <int BITS, int LANE> void write_codes(const uint8_t* codes, uint8_t* to) {
    constexpr int SIZE = 4 / LANE, HIGH = BITS - 4;
    std::memset(to, 0, UNIT_CODES * BITS / 8);
    const auto put = [](uint8_t* boxes, BoxPlace at, uint32_t bits) {
        boxes[at.box * SIZE + at.shift / 8] |= static_cast<uint8_t>(bits << at.shift % 8);
    };
    for (int i = 0; i < UNIT_CODES; ++i) {
        put(to, box_place<SIZE, 4>(i), codes[i] & 15u);
        if constexpr (HIGH > 0) put(to + NIBBLE_BYTES, box_place<SIZE, HIGH>(i), static_cast<uint32_t>(codes[i]) >> 4);
    }
}

template <int BITS> void write_codes(int lane, const uint8_t* codes, uint8_t* to) {
    if (BITS == 8) std::memcpy(to, codes, UNIT_CODES);
    else if (lane == 1) write_codes<BITS & 7, 1>(codes, to);
    else if (lane == 2) write_codes<BITS & 7, 2>(codes, to);
    else write_codes<BITS & 7, 4>(codes, to);
}

// Packs the rows that `rows` points at (null: zeros), `count` whole panels of them, `units` along k,
// for operands of `lane` per lane.
template <class F>
void pack_blocks(Team& team, int lane, const uint8_t* const* rows, int64_t count, int64_t units, uint8_t* panels) {
    team.each(count, 1, [&](int64_t panel) {
        uint8_t* base = panels + panel * F::panel_bytes(units);
        for (int64_t u = 0; u < units; ++u) {
            uint8_t *head = base + F::head_at(u), *unit = base + F::unit_at(u), codes[UNIT_CODES];
            for (int c = 0; c < PANEL; ++c) {
                const uint8_t* row = rows[panel * PANEL + c];
                FileUnit from{};
                if (row) from = read_unit<F>(row, u);
                else std::fill_n(from.codes, UNIT, static_cast<uint8_t>(F::CENTRE));
                uint8_t* halves = F::SUPER ? head : unit;
                put_half(halves, c, from.scale);
                if constexpr (F::OFFSET) put_half(halves + 2 * PANEL, c, from.offset);
                if constexpr (F::SUPER) {
                    for (int g = 0; g < F::GROUPS; ++g) unit[g * PANEL + c] = from.scale_parts[g];
                    if constexpr (F::OFFSET) unit[F::GROUPS * PANEL + c] = from.offset_part;
                }
                for (int k = 0; k < UNIT; ++k) codes[place(lane, k, c)] = from.codes[k];
            }
            write_codes<F::BITS>(lane, codes, unit + F::SCALES);
        }
    });
}

}  // namespace agentserve
