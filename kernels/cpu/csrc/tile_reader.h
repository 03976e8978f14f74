// One tile's keys and values out of their pages, as key blocks that the products can read.
//
// Where pages hold whole key blocks, lane for lane as operands or soon made so, these are read in
// place: operands always, others by tasks of few rows. All else is copied together first, as
// operands: once per task and tile, however many rows read it.
#pragma once

#include <algorithm>

#include "key_blocks.h"
#include "pages.h"

namespace agentserve {

// Keys `low .. high` of the tile that begins at `tile`: what some row of a task sees of it.
struct TileRange {
    const int64_t* table;
    int64_t tile, low, high;
    int kv_head;

    int first() const { return static_cast<int>(low - tile) / KEY_BLOCK; }
    int end() const { return (static_cast<int>(high - tile) + KEY_BLOCK - 1) / KEY_BLOCK; }
};

template <class K, class T> class TileReader {
public:
    static constexpr bool LANE_FOR_LANE = K::PAIR == T::PAIR;
    static constexpr bool CONVERTED = !std::is_same_v<K, T>;

    explicit TileReader(const Pages<K>& pages)
        : pages_(pages), wide_(widened(pages.dim)), whole_(pages.slots % KEY_BLOCK == 0 && pages.dim == wide_) {}

    // Whether a task's products make operands of what they read themselves.
    bool reads_pages(int rows) const { return CONVERTED && LANE_FOR_LANE && whole_ && rows <= ATTENTION_ROWS; }
    // The same for one tile's values: slots that no row may see must be no numbers that spread.
    bool reads_values(const TileRange& range, int rows) const {
        return reads_pages(rows) && (SCALED<K> || (range.low % KEY_BLOCK == 0 && range.high % KEY_BLOCK == 0));
    }

    // Bytes from one lane of a key block's keys to the next, read in place or not.
    int64_t key_stride(bool in_place) const {
        return copies_keys(in_place) ? KEY_BLOCK * OPERAND : pages_.slots * PAGE_LANE;
    }

    // `found [TILE / W]`: first lanes of W keys each. Copies go to `room [TILE][dim]`.
    void keys(const TileRange& range, bool in_place, typename T::Stored* room, const char** found) const {
        for (int b = range.first(); b < range.end(); ++b) {
            auto* to = room + static_cast<int64_t>(b) * KEY_BLOCK * pages_.dim;
            const auto* at = reinterpret_cast<const char*>(to);
            const int64_t lane = copies_keys(in_place) ? OPERAND : PAGE_LANE;
            if (!copies_keys(in_place)) at = keys_at(range, b);
            else if (whole_) unpack_keys(range, b, reinterpret_cast<uint32_t*>(to));
            else gather_keys(range, b, to);
            for (int v = 0; v < KEY_BLOCK / W; ++v) found[b * (KEY_BLOCK / W) + v] = at + v * W * lane;
        }
    }

    // `found [TILE / KEY_BLOCK]`: first lanes of a key block's values. Copies go to `room [TILE][wide]`;
    // they have zeros outside the range: slots that no row may see can hold anything, and 0 times NaN is NaN.
    void values(const TileRange& range, bool in_place, typename T::Stored* room, const char** found) const {
        for (int b = range.first(); b < range.end(); ++b) {
            auto* to = room + static_cast<int64_t>(b) * KEY_BLOCK * wide_;
            const int64_t at = range.tile + b * KEY_BLOCK;
            const bool partial = range.low > at || at + KEY_BLOCK > range.high;
            found[b] = reinterpret_cast<const char*>(to);
            if (in_place) {
                found[b] = values_at(range, b);
            } else if (whole_ && CONVERTED) {
                unpack_values(range, b, reinterpret_cast<uint32_t*>(to));
                if (partial && !SCALED<K>) clear_outside(range, b, to);  // codes are always finite, and their weights 0
            } else if (!whole_ || partial) {
                gather_values(range, b, to);
            } else {
                found[b] = values_at(range, b);
            }
        }
    }

    // Scales of the tile's keys (`head` of the page's keys) or values (kv_heads + head), times `factor`;
    // 0 outside the range.
    void scales(const TileRange& range, int head, float factor, float* to) const {
        for (int k = range.first() * KEY_BLOCK; k < range.end() * KEY_BLOCK; ++k) to[k] = 0.0f;
        if (!whole_) {
            for (int64_t at = range.low; at < range.high; ++at)
                to[at - range.tile] = factor * pages_.scale(range.table[at / pages_.slots], head, at % pages_.slots);
            return;
        }
        const vi low = set1_lanes(static_cast<uint32_t>(range.low - range.tile));
        const vi high = set1_lanes(static_cast<uint32_t>(range.high - range.tile));
        for (int b = range.first(); b < range.end(); ++b) {
            const Block block = locate(range, b);
            const auto* from = reinterpret_cast<const float*>(pages_.scales(block.page, head)) + block.inside;
            for (int k = 0; k < KEY_BLOCK; k += W) {
                const vi index = add_lanes(iota(), set1_lanes(static_cast<uint32_t>(b * KEY_BLOCK + k)));
                store(to + b * KEY_BLOCK + k, in_range(index, low, high, mul(load(from + k), set1(factor)), set1(0.0f)));
            }
        }
    }

    // Where a tile's keys begin in memory, block by block; null where there are none.
    Ahead keys_ahead(const TileRange& range) const {
        Ahead ahead{{}, static_cast<int64_t>(pages_.slots) * AHEAD * W / KEY_BLOCK};
        each_ahead(range, range.kv_head, [&](int b, int64_t page, int64_t inside) {
            ahead.at[b] = reinterpret_cast<const char*>(pages_.keys(page, range.kv_head) + inside * K::PAIR);
        });
        return ahead;
    }
    Ahead values_ahead(const TileRange& range) const {
        Ahead ahead{{}, KEY_BLOCK * AHEAD};
        each_ahead(range, pages_.kv_heads + range.kv_head, [&](int b, int64_t page, int64_t inside) {
            ahead.at[b] = reinterpret_cast<const char*>(pages_.values(page, range.kv_head) + inside / K::PAIR * K::PAIR * pages_.dim);
        });
        return ahead;
    }

private:
    struct Block {
        int64_t page, inside;
    };
    static constexpr int64_t ELEMENT = sizeof(typename K::Stored);
    static constexpr int64_t OPERAND = sizeof(uint32_t), PAGE_LANE = K::PAIR * ELEMENT;  // bytes of a lane
    // Bytes of pages per operand lane: the products ask for memory ahead once per lane.
    static constexpr int64_t AHEAD = T::PAIR * ELEMENT;

    const Pages<K>& pages_;
    const int wide_;  // head dimension filled up to whole key blocks
    const bool whole_;  // pages hold whole key blocks

    bool copies_keys(bool in_place) const { return !whole_ || (CONVERTED && !in_place); }

    Block locate(const TileRange& range, int b) const {
        const int64_t at = range.tile + b * KEY_BLOCK;
        return {range.table[at / pages_.slots], at % pages_.slots};
    }
    const char* keys_at(const TileRange& range, int b) const {
        const Block block = locate(range, b);
        return reinterpret_cast<const char*>(pages_.keys(block.page, range.kv_head) + block.inside * K::PAIR);
    }
    const char* values_at(const TileRange& range, int b) const {
        const Block block = locate(range, b);
        return reinterpret_cast<const char*>(pages_.values(block.page, range.kv_head) + block.inside * wide_);
    }

    // Each block's first visible key, and its scales asked for at once: they are one line.
    template <class Body> void each_ahead(const TileRange& range, int scales_of, const Body& body) const {
        for (int b = 0; b < TILE / KEY_BLOCK; ++b) {
            const int64_t at = std::max(range.tile + b * KEY_BLOCK, range.low);
            if (at >= range.high || at >= range.tile + (b + 1) * KEY_BLOCK) continue;
            const int64_t page = range.table[at / pages_.slots], inside = at % pages_.slots;
            body(b, page, inside);
            if constexpr (SCALED<K>) __builtin_prefetch(pages_.scales(page, scales_of) + inside * static_cast<int64_t>(sizeof(float)));
        }
    }

    void unpack_keys(const TileRange& range, int b, uint32_t* to) const {
        const auto* from = reinterpret_cast<const typename K::Stored*>(keys_at(range, b));
        for (int lane = 0; lane < pages_.dim / K::PAIR; ++lane, from += pages_.slots * K::PAIR, to += K::PAIR / T::PAIR * KEY_BLOCK)
            for (int k = 0; k < KEY_BLOCK; k += W) unpack<K, T>(from + k * K::PAIR, to + k, KEY_BLOCK);
    }
    void unpack_values(const TileRange& range, int b, uint32_t* to) const {
        const auto* from = reinterpret_cast<const typename K::Stored*>(values_at(range, b));
        for (int lane = 0; lane < KEY_BLOCK / K::PAIR; ++lane, to += K::PAIR / T::PAIR * wide_)
            for (int d = 0; d < wide_; d += W, from += W * K::PAIR) unpack<K, T>(from, to + d, wide_);
    }
    void clear_outside(const TileRange& range, int b, typename T::Stored* to) const {
        static_assert(!CONVERTED || SCALED<K> || T::PAIR == 1);  // a slot is a row
        for (int64_t i = 0; i < KEY_BLOCK; ++i) {
            const int64_t at = range.tile + b * KEY_BLOCK + i;
            if (at < range.low || at >= range.high) std::fill_n(to + i * wide_, wide_, typename T::Stored(0));
        }
    }

    // Visible slots of key block b, one by one, the rest zeros.
    template <class Body> void each_slot(const TileRange& range, int b, const Body& body) const {
        const int64_t low = std::max(range.low, range.tile + b * KEY_BLOCK), high = std::min(range.high, range.tile + (b + 1) * KEY_BLOCK);
        for (int64_t at = low; at < high; ++at) body(range.table[at / pages_.slots], at % pages_.slots, at % KEY_BLOCK);
    }
    void gather_keys(const TileRange& range, int b, typename T::Stored* to) const {
        const int dim = pages_.dim;
        std::fill_n(to, KEY_BLOCK * dim, typename T::Stored(0));
        each_slot(range, b, [&](int64_t page, int64_t inside, int64_t i) {
            const auto* from = pages_.keys(page, range.kv_head) + inside * K::PAIR;
            for (int d = 0; d < dim; ++d)
                to[(d / T::PAIR * KEY_BLOCK + i) * T::PAIR + d % T::PAIR] =
                    as_operand<K, T>(from[d / K::PAIR * pages_.slots * K::PAIR + d % K::PAIR]);
        });
    }
    void gather_values(const TileRange& range, int b, typename T::Stored* to) const {
        std::fill_n(to, KEY_BLOCK * wide_, typename T::Stored(0));
        each_slot(range, b, [&](int64_t page, int64_t inside, int64_t i) {
            const auto place = pages_.value_place(inside);
            const auto* from = pages_.values(page, range.kv_head) + place.start;
            for (int d = 0; d < pages_.dim; ++d)
                to[(i / T::PAIR * wide_ + d) * T::PAIR + i % T::PAIR] = as_operand<K, T>(from[d * place.step]);
        });
    }
};

}  // namespace agentserve
