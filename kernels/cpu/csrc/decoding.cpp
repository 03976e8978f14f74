// The C interface: a whole forward pass.
#include "decoder.h"

using namespace agentserve;

namespace {

struct Opened {
    std::unique_ptr<Decoder<Bf16>> bf16;
    std::unique_ptr<Decoder<F32>> f32;
    template <class Body> void with(const Body& body) { bf16 ? body(*bf16) : body(*f32); }
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// `model` and what it points at must outlive the decoder.
void* agentserve_open(int type, const Model* model) {
    auto* opened = new Opened;
    if (type == 0) opened->bf16 = std::make_unique<Decoder<Bf16>>(*model);
    else opened->f32 = std::make_unique<Decoder<F32>>(*model);
    return opened;
}

void agentserve_close(void* opened) { delete static_cast<Opened*>(opened); }

void agentserve_forward(void* opened, int rows, const int64_t* tokens, const int64_t* positions, const Group* groups,
                        int group_count, void* out, uint8_t* finite, int threads) {
    static_cast<Opened*>(opened)->with([&](auto& decoder) {
        using Stored = typename std::decay_t<decltype(decoder)>::Stored;
        decoder.forward(rows, tokens, positions, groups, group_count, static_cast<Stored*>(out), finite, threads);
    });
}

void agentserve_logits(void* opened, int rows, const void* hidden, float* out, int64_t* best, uint8_t* finite, int threads) {
    static_cast<Opened*>(opened)->with([&](auto& decoder) {
        using Stored = typename std::decay_t<decltype(decoder)>::Stored;
        decoder.logits(rows, static_cast<const Stored*>(hidden), out, best, finite, threads);
    });
}

}  // extern "C"
#pragma GCC visibility pop
