// The `type` of functions of the C interface.
#pragma once

#include "element.h"

namespace agentserve {

// 0 is bfloat16, 1 is float.
template <class Body> auto with_type(int type, const Body& body) {
    return type == 0 ? body(Bf16()) : body(F32());
}

}  // namespace agentserve
