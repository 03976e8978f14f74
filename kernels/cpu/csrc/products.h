// What products are made of: rows of operands times one panel. Compiled apart from who calls it
// (`products.cpp`).
#pragma once

#include "operands.h"

namespace agentserve {

template <class T> struct FloatOperand;
struct ByteOperand;

// Rows in blocks of nearly the same size.
struct RowBlocks {
    int64_t rows, blocks;
    int64_t first(int64_t block) const { return rows * block / blocks; }
};

// `rows` (at most GEMM_ROWS) rows of A, `stride` lanes apart, times a panel of numbers.
template <class T>
void plain_product(int rows, const uint32_t* a, int64_t stride, const uint32_t* panel, int steps, float (*out)[PANEL]);

// Blocks `begin .. end - 1` of the operand's rows times a whole panel of blocks; `total` begins as zeros.
// `next` is the panel that the thread will read after this one. Op: FloatOperand<T> or ByteOperand.
template <class Op>
void blocks_product(const Panel& panel, int64_t units, const uint8_t* next, const Operand& x, int64_t begin, int64_t end,
                    const RowBlocks& split, float (*total)[PANEL]);

// The weights of output `column` of a panel of blocks, in GGML's order: scale times code, rounded, plus offset.
template <class T> void unpack_blocks(const Panel& panel, int column, int64_t units, float* out);

}  // namespace agentserve
