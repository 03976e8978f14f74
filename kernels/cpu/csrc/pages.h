// How K and V lie inside a page, and how they get there.
//
// A page of one layer: K as `[kv_heads][dim lanes][slots]`, so that one load is the same lane of W
// keys, then V as `[kv_heads][slot lanes][dim]`. A lane is 32 bits: two bfloat16 neighbours along
// the summed dimension (dim for K, slots for V) or one float. The last slot of an odd page is not
// paired. As many bytes as `[2][slots][kv_heads][dim]`.
#pragma once

#include "element.h"

namespace agentserve {

// One KV group's storage as one layer sees it. Strides in elements.
template <class T> struct Pages {
    using Stored = typename T::Stored;
    Stored* base;  // of the layer, in page 0
    int64_t page_stride;
    int slots, kv_heads, dim;

    Stored* keys(int64_t page, int head) const { return base + page * page_stride + static_cast<int64_t>(head) * dim * slots; }
    Stored* values(int64_t page, int head) const { return keys(page, kv_heads + head); }

    // Where a slot's values are: element d at `start + d * step`.
    struct Place {
        int64_t start, step;
    };
    Place value_place(int64_t inside) const {
        if ((inside | (T::PAIR - 1)) >= slots) return {inside * dim, 1};
        return {inside / T::PAIR * dim * T::PAIR + inside % T::PAIR, T::PAIR};
    }

    void write_key(int64_t slot, int head, const Stored* k) const {
        Stored* to = keys(slot / slots, head) + slot % slots * T::PAIR;
        for (int d = 0; d < dim; d += T::PAIR, to += slots * T::PAIR) std::memcpy(to, k + d, T::PAIR * sizeof(Stored));
    }
    void write_value(int64_t slot, int head, const Stored* v) const {
        const Place place = value_place(slot % slots);
        Stored* to = values(slot / slots, head) + place.start;
        for (int d = 0; d < dim; ++d) to[d * place.step] = v[d];
    }
    // The first `count` slots of a page of this layer.
    void copy(int64_t source, int64_t target, int count) const {
        for (int head = 0; head < kv_heads; ++head) {
            for (int d = 0; d < dim; d += T::PAIR)
                std::memcpy(keys(target, head) + d * slots, keys(source, head) + d * slots,
                            static_cast<size_t>(count) * T::PAIR * sizeof(Stored));
            const int whole = count / T::PAIR * T::PAIR;
            const Stored* from = values(source, head);
            Stored* to = values(target, head);
            std::memcpy(to, from, static_cast<size_t>(whole) * dim * sizeof(Stored));
            for (int slot = whole; slot < count; ++slot) {
                const Place place = value_place(slot);
                for (int d = 0; d < dim; ++d) to[place.start + d * place.step] = from[place.start + d * place.step];
            }
        }
    }
};

}  // namespace agentserve
