// The C interface: packing weights.
#include "pack.h"
#include "types.h"

using namespace agentserve;

#pragma GCC visibility push(default)
extern "C" {

void agentserve_pack(int type, const void* w, int64_t n, int64_t k, int pair_halves, void* panels, int threads) {
    with_type(type, [&](auto t) {
        using T = decltype(t);
        with_team(threads, 1, [&](Team& team) {
            pack<T>(team, static_cast<const typename T::Stored*>(w), n, k, pair_halves != 0, static_cast<uint32_t*>(panels));
        });
    });
}

int64_t agentserve_block_panel_bytes(int format, int64_t units) {
    return with_format(format, [&](auto f) { return decltype(f)::panel_bytes(units); });
}

// Whether weights of a format have an offset, which a product adds by the sums of its operands.
int agentserve_block_has_offset(int format) {
    return with_format(format, [&](auto f) { return decltype(f)::OFFSET; });
}

// rows: PANEL * count addresses of rows of blocks, or null. `lane`: operands in 32 bits.
void agentserve_pack_blocks(int format, int lane, const uint8_t* const* rows, int64_t count, int64_t units, uint8_t* panels,
                            int threads) {
    with_format(format, [&](auto f) {
        using F = decltype(f);
        with_team(threads, 1, [&](Team& team) { pack_blocks<F>(team, lane, rows, count, units, panels); });
    });
}

}  // extern "C"
#pragma GCC visibility pop
