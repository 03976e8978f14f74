// The C interface that kernels/cpu/library.py calls: single operations. `type`: see types.h.
#include "attention.h"
#include "gemm.h"
#include "machine.h"
#include "rows.h"
#include "types.h"

using namespace agentserve;

struct Kv {
    void* base;
    int64_t page_stride;  // elements
    int32_t slots, kv_heads, dim, type;  // KvType
};

namespace {

template <class K> Pages<K> pages_of(const Kv& kv) {
    return {static_cast<typename K::Stored*>(kv.base), kv.page_stride, kv.slots, kv.kv_heads, kv.dim};
}

// One token's K or V of one head, on its way from a step in S to pages in K.
template <class S, class K> struct KeptRow {
    const typename K::Stored* numbers = nullptr;
    float scale = 0.0f;

    explicit KeptRow(int dim) : dim_(dim), wide_(static_cast<size_t>(dim)), kept_(static_cast<size_t>(dim)) {}

    __attribute__((noinline)) void read(const typename S::Stored* from) {
        if constexpr (std::is_same_v<S, K>) {
            numbers = from;
        } else {
            widen_row<S>(from, dim_, wide_.data());
            scale = keep<S, K>(wide_.data(), dim_, kept_.data());
            numbers = kept_.data();
        }
    }

private:
    const int dim_;
    std::vector<float> wide_;
    std::vector<typename K::Stored> kept_;
};

// Each row r < rows, split among threads.
template <class Body> void rows_of(int64_t rows, int threads, const Body& body) {
    with_team(threads, 1, [&](Team& team) { team.each(rows, std::max<int64_t>(1, rows / (8 * threads)), body); });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int agentserve_lanes() { return W; }

// Benchmarks: read all of `data`; the number returned is made of every lane.
uint32_t agentserve_read(const void* data, int64_t nbytes, int threads) {
    std::atomic<uint32_t> found{0};
    with_team(threads, 1, [&](Team& team) { read_memory(team, static_cast<const char*>(data), nbytes, found); });
    return found.load();
}

double agentserve_repeat_dots(int type, int64_t rounds, int threads) { return repeat_dots_of(type, rounds, threads); }

// x: `rows` rows of `width` numbers, a multiple of a lane's.
void agentserve_linear(int type, const Matrix* w, const void* x, int64_t width, int rows, void* out, int threads) {
    with_type(type, [&](auto t) {
        using T = decltype(t);
        using Stored = typename T::Stored;
        OperandRows<T> prepared;
        prepared.fit(rows, width, w->need);
        with_team(threads, PRODUCT_STAGES, [&](Team& team) {
            prepared_product<T>(team, *w, static_cast<const Stored*>(x), width, rows, prepared,
                                StoreRounded<T>{static_cast<Stored*>(out), w->n});
        });
    });
}

// residual may be null: then x alone is normed, and total is not written.
void agentserve_rms_norm(int type, const void* x, const void* residual, const float* weight, int64_t rows, int64_t n,
                         float eps, void* out, void* total, int threads) {
    with_type(type, [&](auto t) {
        using T = decltype(t);
        using Stored = typename T::Stored;
        rows_of(rows, threads, [&](int64_t r) {
            std::vector<float> wide(static_cast<size_t>(2 * n));
            widen_row<T>(static_cast<const Stored*>(x) + r * n, n, wide.data());
            if (residual) {
                float* other = wide.data() + n;
                Stored* sum = static_cast<Stored*>(total) + r * n;
                widen_row<T>(static_cast<const Stored*>(residual) + r * n, n, other);
                for (int64_t i = 0; i < n; ++i) wide[static_cast<size_t>(i)] += other[i];
                round_row<T>(wide.data(), n, sum);
                widen_row<T>(sum, n, wide.data());
            }
            rms_norm<T>(wide.data(), weight, n, eps, static_cast<Stored*>(out) + r * n);
        });
    });
}

// x: rows `stride` elements apart.
void agentserve_rope(int type, const void* x, int64_t stride, const float* cos, const float* sin, int64_t rows, int64_t heads,
                     int64_t dim, void* out, int threads) {
    with_type(type, [&](auto t) {
        using T = decltype(t);
        using Stored = typename T::Stored;
        rows_of(rows, threads, [&](int64_t r) {
            std::vector<float> wide(static_cast<size_t>(dim));
            for (int64_t h = 0; h < heads; ++h) {
                widen_row<T>(static_cast<const Stored*>(x) + r * stride + h * dim, dim, wide.data());
                rotate(wide.data(), cos + r * (dim / 2), sin + r * (dim / 2), dim);
                round_row<T>(wide.data(), dim, static_cast<Stored*>(out) + (r * heads + h) * dim);
            }
        });
    });
}

void agentserve_silu_mul(int type, const void* gate_up, int64_t rows, int64_t inner, void* out, int threads) {
    with_type(type, [&](auto t) {
        using T = decltype(t);
        using Stored = typename T::Stored;
        rows_of(rows, threads, [&](int64_t r) {
            const int64_t padded = (inner + W - 1) / W * W;
            std::vector<float> wide(static_cast<size_t>(2 * padded));
            float *gate = wide.data(), *up = gate + padded;
            const Stored* from = static_cast<const Stored*>(gate_up) + r * 2 * inner;
            widen_row<T>(from, inner, gate);
            widen_row<T>(from + inner, inner, up);
            for (int64_t i = 0; i < padded; i += W) store(gate + i, silu_mul(load(gate + i), load(up + i)));
            round_row<T>(gate, inner, static_cast<Stored*>(out) + r * inner);
        });
    });
}

// k, v: rows `k_stride`, `v_stride` elements apart.
void agentserve_write_kv(int type, const Kv* kv, const int64_t* slots, const void* k, int64_t k_stride, const void* v,
                         int64_t v_stride, int64_t rows) {
    with_type(type, [&](auto t) {
        with_kv(kv->type, [&](auto kept) {
            using S = decltype(t);
            using K = decltype(kept);
            const auto pages = pages_of<K>(*kv);
            KeptRow<S, K> row(kv->dim);
            for (int64_t r = 0; r < rows; ++r)
                for (int h = 0; h < kv->kv_heads; ++h) {
                    row.read(static_cast<const typename S::Stored*>(k) + r * k_stride + h * kv->dim);
                    pages.write_key(slots[r], h, row.numbers, row.scale);
                    row.read(static_cast<const typename S::Stored*>(v) + r * v_stride + h * kv->dim);
                    pages.write_value(slots[r], h, row.numbers, row.scale);
                }
        });
    });
}

// The first `count` slots of every layer.
void agentserve_copy_page(const Kv* kv, int64_t layer_stride, int layers, int64_t source, int64_t target, int count) {
    with_kv(kv->type, [&](auto kept) {
        using K = decltype(kept);
        auto pages = pages_of<K>(*kv);
        if (count == kv->slots && layers * layer_stride == kv->page_stride) {
            std::memcpy(pages.base + target * kv->page_stride, pages.base + source * kv->page_stride,
                        static_cast<size_t>(kv->page_stride) * sizeof *pages.base);
            return;
        }
        for (int layer = 0; layer < layers; ++layer, pages.base += layer_stride) pages.copy(source, target, count);
    });
}

// spans: (row, rows, position) triples; tables: [count][columns]. window 0: none.
void* agentserve_plan(const int64_t* spans, int64_t count, const int64_t* tables, int64_t columns, int window, int group, int slots) {
    return new Plan(reinterpret_cast<const Span*>(spans), count, tables, columns, window, group, slots);
}

void agentserve_free_plan(void* plan) { delete static_cast<Plan*>(plan); }

int64_t agentserve_shared_keys(const void* plan) { return static_cast<const Plan*>(plan)->shared_keys; }

void agentserve_attention(int type, const void* plan, const Kv* kv, int heads, const void* q, void* out, int threads) {
    with_type(type, [&](auto t) {
        with_kv(kv->type, [&](auto kept) {
            using S = decltype(t);
            using K = decltype(kept);
            using Stored = typename S::Stored;
            const auto& p = *static_cast<const Plan*>(plan);
            std::vector<float> partials(static_cast<size_t>(p.partials * partial_floats(heads, kv->dim)));
            const auto pages = pages_of<K>(*kv);
            const AttentionRows<S> rows{p, heads, static_cast<const Stored*>(q), static_cast<Stored*>(out), partials.data()};
            with_team(threads, ATTENTION_STAGES, [&](Team& team) {
                AnyScratch scratch;
                run_attention<S, K>(team, rows, pages, scratch);
            });
        });
    });
}

}  // extern "C"
#pragma GCC visibility pop
