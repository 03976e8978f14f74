// Attention with products in float (`KvOperand`).
#include "softmax.h"

namespace agentserve {

template void run_attention(Team&, const AttentionRows<F32>&, const Pages<F32>&, AnyScratch&);
template void run_attention(Team&, const AttentionRows<F32>&, const Pages<Bf16>&, AnyScratch&);
template void run_attention(Team&, const AttentionRows<F32>&, const Pages<Fp16>&, AnyScratch&);
template void run_attention(Team&, const AttentionRows<F32>&, const Pages<Int8>&, AnyScratch&);
template void run_attention(Team&, const AttentionRows<Bf16>&, const Pages<F32>&, AnyScratch&);
template void run_attention(Team&, const AttentionRows<Bf16>&, const Pages<Fp16>&, AnyScratch&);

}  // namespace agentserve
