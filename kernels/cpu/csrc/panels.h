// Weights as products read them: panels of PANEL outputs, each one run of memory along k.
//
// A panel holds numbers (`gemm.h`) or blocks in one format (`codes.h`); panels of one matrix may
// differ. `pair_halves` panels hold PANEL / 2 gates, then the ups that belong to them.
#pragma once

#include <algorithm>

#include "element.h"

namespace agentserve {

constexpr int PANEL = 32;
constexpr int UNIT = 32;  // weights along k that blocks are unpacked by; all formats have whole units

// Mirrored by kernels/cpu/library.py, as are the three structures below it.
enum Format : int32_t { PLAIN, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

// What products need to know of each operand row beside its numbers.
enum Need : int32_t { NOTHING_MORE, SUMS, CODES };  // nothing; sums of groups; 8-bit codes

struct Panel {
    const uint8_t* data;
    int32_t format;
    int32_t first, width;  // outputs; of pairs: the place of the first pair, and their number
};

struct Matrix {
    const Panel* panels;
    const float* bias;  // one per panel column (padded with 0), or null
    int32_t n;          // outputs
    int32_t steps;      // lanes along k of plain panels
    int32_t units;      // UNITs along k of blocks
    int32_t panel_count;
    int32_t need;  // CODES: panels are laid out for 8-bit operands
};

// The panel that has output `row`.
inline const Panel& panel_of(const Matrix& w, int64_t row) {
    const Panel* end = w.panels + w.panel_count;
    return *(std::upper_bound(w.panels, end, row, [](int64_t r, const Panel& p) { return r < p.first; }) - 1);
}

}  // namespace agentserve
