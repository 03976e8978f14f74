// Paged causal attention of one step over one KV group's pages in one layer. Compiled apart from who
// calls it (`attention_*.cpp`), for each step type and each type of pages.
#pragma once

#include "attention_scratch.h"
#include "pages.h"
#include "team.h"

namespace agentserve {

constexpr int ATTENTION_STAGES = 2;  // tasks, merging

// Floats of one partial of a `Plan`.
inline int64_t partial_floats(int heads, int dim) { return static_cast<int64_t>(heads) * (widened(dim) + W); }

// Queries of all rows, `[rows][heads][dim]`, where their results go, and room for the plan's partials.
template <class S> struct AttentionRows {
    const Plan& plan;
    int heads;
    const typename S::Stored* q;
    typename S::Stored* out;
    float* partials;
};

// Of a step in S, over pages in K.
template <class S, class K>
void run_attention(Team& team, const AttentionRows<S>& rows, const Pages<K>& pages, AnyScratch& scratch);

}  // namespace agentserve
