// How K and V lie inside a page, and how they get there.
//
// A page of one layer: K as `[kv_heads][dim lanes][slots]`, so that one load is the same lane of W
// keys, then V as `[kv_heads][slot lanes][dim]`. A lane is two bfloat16 or 8-bit neighbours along
// the summed dimension (dim for K, slots for V), or one fp16 or float. The last slot of an odd page
// is not paired. Scales, where there are, follow each head's numbers: `[slots]` floats, not aligned
// for every page size. As many bytes as `[2][slots][kv_heads][dim and scale]`.
#pragma once

#include "kv_formats.h"

namespace agentserve {

// One KV group's storage in K as one layer sees it. Strides in elements.
template <class K> struct Pages {
    using Stored = typename K::Stored;
    Stored* base;  // of the layer, in page 0
    int64_t page_stride;
    int slots, kv_heads, dim;

    Stored* keys(int64_t page, int head) const {
        return base + page * page_stride + static_cast<int64_t>(head) * (dim + TAIL<K>) * slots;
    }
    Stored* values(int64_t page, int head) const { return keys(page, kv_heads + head); }

    // Scales of a page's keys; of its values with head `kv_heads + head`.
    char* scales(int64_t page, int head) const {
        return reinterpret_cast<char*>(keys(page, head) + static_cast<int64_t>(dim) * slots);
    }
    float scale(int64_t page, int head, int64_t inside) const {
        float found;
        std::memcpy(&found, scales(page, head) + inside * static_cast<int64_t>(sizeof found), sizeof found);
        return found;
    }

    // Where a slot's values are: element d at `start + d * step`.
    struct Place {
        int64_t start, step;
    };
    Place value_place(int64_t inside) const {
        if ((inside | (K::PAIR - 1)) >= slots) return {inside * dim, 1};
        return {inside / K::PAIR * dim * K::PAIR + inside % K::PAIR, K::PAIR};
    }

    void write_key(int64_t slot, int head, const Stored* k, float scale) const {
        Stored* to = keys(slot / slots, head) + slot % slots * K::PAIR;
        for (int d = 0; d < dim; d += K::PAIR, to += slots * K::PAIR) std::memcpy(to, k + d, K::PAIR * sizeof(Stored));
        write_scale(slot, head, scale);
    }
    void write_value(int64_t slot, int head, const Stored* v, float scale) const {
        const Place place = value_place(slot % slots);
        Stored* to = values(slot / slots, head) + place.start;
        for (int d = 0; d < dim; ++d) to[d * place.step] = v[d];
        write_scale(slot, kv_heads + head, scale);
    }
    // The first `count` slots of a page of this layer.
    void copy(int64_t source, int64_t target, int count) const {
        for (int head = 0; head < kv_heads; ++head) {
            for (int d = 0; d < dim; d += K::PAIR)
                std::memcpy(keys(target, head) + d * slots, keys(source, head) + d * slots,
                            static_cast<size_t>(count) * K::PAIR * sizeof(Stored));
            const int whole = count / K::PAIR * K::PAIR;
            const Stored* from = values(source, head);
            Stored* to = values(target, head);
            std::memcpy(to, from, static_cast<size_t>(whole) * dim * sizeof(Stored));
            for (int slot = whole; slot < count; ++slot) {
                const Place place = value_place(slot);
                for (int d = 0; d < dim; ++d) to[place.start + d * place.step] = from[place.start + d * place.step];
            }
        }
        for (int head = 0; SCALED<K> && head < 2 * kv_heads; ++head)
            std::memcpy(scales(target, head), scales(source, head), static_cast<size_t>(count) * sizeof(float));
    }

private:
    void write_scale(int64_t slot, int head, float scale) const {
        if constexpr (SCALED<K>)
            std::memcpy(scales(slot / slots, head) + slot % slots * static_cast<int64_t>(sizeof scale), &scale, sizeof scale);
    }
};

}  // namespace agentserve
