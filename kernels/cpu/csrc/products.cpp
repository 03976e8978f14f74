// What products are made of, for every type of operands.
#include "blocks.h"
#include "plain.h"

namespace agentserve {

template void plain_product<Bf16>(int, const uint32_t*, int64_t, const uint32_t*, int, float (*)[PANEL]);
template void plain_product<F32>(int, const uint32_t*, int64_t, const uint32_t*, int, float (*)[PANEL]);

template void blocks_product<FloatOperand<Bf16>>(const Panel&, int64_t, const uint8_t*, const Operand&, int64_t, int64_t, const RowBlocks&,
                                                 float (*)[PANEL]);
template void blocks_product<FloatOperand<F32>>(const Panel&, int64_t, const uint8_t*, const Operand&, int64_t, int64_t, const RowBlocks&,
                                                float (*)[PANEL]);
template void blocks_product<ByteOperand>(const Panel&, int64_t, const uint8_t*, const Operand&, int64_t, int64_t, const RowBlocks&,
                                          float (*)[PANEL]);

template void unpack_blocks<Bf16>(const Panel&, int, int64_t, float*);
template void unpack_blocks<F32>(const Panel&, int, int64_t, float*);

}  // namespace agentserve
