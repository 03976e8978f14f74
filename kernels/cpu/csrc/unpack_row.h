// Single rows read back out of panels.
#pragma once

#include "products.h"

namespace agentserve {

template <class T> void unpack_plain(const Panel& panel, int64_t c, int64_t k, float* out) {
    const auto* from = reinterpret_cast<const typename T::Stored*>(panel.data);
    for (int64_t i = 0; i < k; ++i) out[i] = T::widen(from[(i / T::PAIR * PANEL + c) * T::PAIR + i % T::PAIR]);
}

// Row `row` of the unpacked matrix, `k` values in float.
template <class T> void unpack_row(const Matrix& w, int64_t row, int64_t k, float* out) {
    const Panel& panel = panel_of(w, row);
    if (panel.format == PLAIN) unpack_plain<T>(panel, row - panel.first, k, out);
    else unpack_blocks<T>(panel, static_cast<int>(row - panel.first), w.units, out);
}

}  // namespace agentserve
