// Attention with products in bfloat16 (`KvOperand`).
#include "softmax.h"

namespace agentserve {

template void run_attention(Team&, const AttentionRows<Bf16>&, const Pages<Bf16>&, AnyScratch&);
template void run_attention(Team&, const AttentionRows<Bf16>&, const Pages<Int8>&, AnyScratch&);

}  // namespace agentserve
