// Blocks of keys: what attention computes and reads at a time.
#pragma once

#include "plan.h"
#include "vec.h"

namespace agentserve {

constexpr int KEY_BLOCK = 16;  // keys that are computed together

// Head dimension filled up to whole key blocks.
inline int widened(int dim) { return (dim + KEY_BLOCK - 1) / KEY_BLOCK * KEY_BLOCK; }

template <class T> constexpr int BLOCK_LANES = KEY_BLOCK / T::PAIR;

// Memory is kept busy during computation: each block asks, line by line, for what the thread will
// read next. `step` is 0 where another block of rows has asked already.
struct Ahead {
    const char* at[TILE / KEY_BLOCK];  // one address per key block
    int64_t step;                      // bytes per line
};

}  // namespace agentserve
