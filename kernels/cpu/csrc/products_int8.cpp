// Products of block weights with operands in 8 bits.
#include "blocks.h"

namespace agentserve {

template void blocks_product<ByteOperand>(const Panel&, int64_t, const uint8_t*, const Operand&, int64_t, int64_t, const RowBlocks&,
                                          float (*)[PANEL]);

}  // namespace agentserve
