// A whole forward pass in one parallel region: embedding, every layer, final norm.
//
// Numbers between products: the residual stream, Q, K, V before rotation and the inner product of
// gate and up stay in float; each is rounded once, where it becomes a product's operand or KV.
#pragma once

#include <memory>

#include "attention.h"
#include "gemm.h"
#include "greatest.h"
#include "rows.h"
#include "unpack_row.h"

namespace agentserve {

// Mirrored by kernels/cpu/library.py.
struct Layer {
    Matrix qkv, o, gate_up, down;
    const float *attention_norm, *mlp_norm, *q_norm, *k_norm;  // the last two may be null
    int32_t group, index;                                      // KV group, and place inside it
    int32_t rotary;
};

struct Model {
    int32_t hidden, inner, heads, kv_heads, dim, layers;
    float eps;
    Matrix embedding, head;  // the same where they are tied
    const float *norm, *cos, *sin;
    const Layer* layer;
};

struct Group {
    void* storage;  // [pages][layers][2][slots][kv_heads][dim and scale] of KvType kv
    int64_t page_stride, layer_stride;  // elements
    const int64_t* slots;               // [rows]
    const Plan* plan;
    int32_t slots_per_page, kv;
};

template <class T> class Decoder {
public:
    using Stored = typename T::Stored;

    explicit Decoder(const Model& model) : m_(model) {
        for (int i = 0; i < m_.layers; ++i) {
            const Layer& layer = m_.layer[i];
            normed_need_ = std::max({normed_need_, layer.qkv.need, layer.gate_up.need});
            attended_need_ = std::max(attended_need_, layer.o.need);
            inner_need_ = std::max(inner_need_, layer.down.need);
        }
    }

    // Writes the step's KV, the last layer's normed rows `out [rows][hidden]`, and `finite [rows]`: whether
    // each of them is.
    void forward(int rows, const int64_t* tokens, const int64_t* positions, const Group* groups, int group_count,
                 Stored* out, uint8_t* finite, int threads) {
        fit(rows, groups, group_count, threads);
        with_team(threads, 2 + STAGES * m_.layers, [&](Team& team) {
            const Rows each_row{team, rows, std::max(1, rows / (8 * threads))};
            team.each(rows, each_row.grain, [&](int64_t r) {
                unpack_row<T>(m_.embedding, tokens[r], m_.hidden, residual(r));
                norm(r, m_.layer[0].attention_norm, m_.layer[0].qkv);
            });
            for (int number = 0; number < m_.layers; ++number) {
                const Layer& layer = m_.layer[number];
                const bool end = number + 1 == m_.layers;
                const auto mlp_norm = [&](int64_t r) { norm(r, layer.mlp_norm, layer.gate_up); };
                const auto next_norm = [&](int64_t r) {
                    if (!end) return norm(r, m_.layer[number + 1].attention_norm, m_.layer[number + 1].qkv);
                    rms_norm<T>(residual(r), m_.norm, m_.hidden, m_.eps, out + r * m_.hidden);
                    finite[r] = all_finite<T>(out + r * m_.hidden, m_.hidden);
                };
                const auto prepare_inner = [&](int64_t r) { inner_rows_.prepare(r, &inner_[r * m_.inner], layer.down.need); };
                attend(team, each_row, layer, groups[layer.group], positions);
                product<T>(team, layer.o, attended_rows_.operand(attended_.data()), rows, AddFloat{residual(0), m_.hidden},
                           each_row.few(mlp_norm));
                each_row.many(mlp_norm);
                product<T>(team, layer.gate_up, normed_rows_.operand(normed_.data()), rows, GateUp<T>{inner_.data(), m_.inner},
                           each_row.few(prepare_inner));
                if (layer.down.need) each_row.many(prepare_inner);
                product<T>(team, layer.down, inner_rows_.operand(inner_.data()), rows, AddFloat{residual(0), m_.hidden},
                           each_row.few(next_norm));
                each_row.many(next_norm);
            }
        });
    }

    // `out [rows][vocab]`; whether each row is finite, and if so the lowest place among its greatest.
    void logits(int rows, const Stored* hidden, float* out, int64_t* best, uint8_t* finite, int threads) const {
        const int64_t vocab = m_.head.n;
        OperandRows<T> head_rows;
        head_rows.fit(rows, m_.hidden, m_.head.need);
        GreatestOfRows greatest(rows, threads);
        const auto choose = [&] {
            for (int r = 0; r < rows; ++r) {
                const int64_t place = greatest.place(r, out + r * vocab);
                finite[r] = place >= 0;
                best[r] = std::max<int64_t>(0, place);
            }
        };
        with_team(threads, PRODUCT_STAGES, [&](Team& team) {
            const StoreSeen seen{{out, vocab}, greatest.of_thread(team.thread())};
            prepared_product<T>(team, m_.head, hidden, m_.hidden, rows, head_rows, seen, choose);
        });
    }

private:
    // What is done row by row after a product: few rows by the thread that ends the product,
    // many rows by all threads in a stage of their own.
    struct Rows {
        Team& team;
        int rows;
        int64_t grain;
        template <class Body> auto few(const Body& body) const {
            return [this, &body] {
                for (int64_t r = 0; rows <= FEW && r < rows; ++r) body(r);
            };
        }
        template <class Body> void many(const Body& body) const {
            if (rows > FEW) team.each(rows, grain, body);
        }
    };

    // Per layer, at most: four products, what follows them row by row, attention and what follows it.
    static constexpr int STAGES = 9 + ATTENTION_STAGES;

    const Model m_;
    int32_t normed_need_ = NOTHING_MORE, attended_need_ = NOTHING_MORE, inner_need_ = NOTHING_MORE;  // the most of any layer
    std::vector<float> residual_, qkv_, partials_;
    std::vector<Stored> normed_, q_, attended_, inner_;
    OperandRows<T> normed_rows_, attended_rows_, inner_rows_;
    std::vector<AnyScratch> scratch_;

    int64_t q_size() const { return static_cast<int64_t>(m_.heads) * m_.dim; }
    int64_t qkv_size() const { return (static_cast<int64_t>(m_.heads) + 2 * m_.kv_heads) * m_.dim; }
    float* residual(int64_t row) { return residual_.data() + row * m_.hidden; }

    void fit(int rows, const Group* groups, int group_count, int threads) {
        const size_t n = static_cast<size_t>(rows);
        const auto grow = [](auto& v, size_t size) { if (v.size() < size) v.resize(size); };
        grow(residual_, n * m_.hidden);
        grow(normed_, n * m_.hidden);
        grow(qkv_, n * qkv_size());
        grow(q_, n * q_size());
        grow(attended_, n * q_size());
        grow(inner_, n * m_.inner);
        normed_rows_.fit(rows, m_.hidden, normed_need_);
        attended_rows_.fit(rows, q_size(), attended_need_);
        inner_rows_.fit(rows, m_.inner, inner_need_);
        for (int g = 0; g < group_count; ++g)
            grow(partials_, static_cast<size_t>(groups[g].plan->partials * partial_floats(m_.heads, m_.dim)));
        if (scratch_.size() < static_cast<size_t>(threads)) scratch_.resize(static_cast<size_t>(threads));
    }

    // The row's norm as an operand of `then`.
    void norm(int64_t row, const float* weight, const Matrix& then) {
        Stored* to = normed_.data() + row * m_.hidden;
        rms_norm<T>(residual(row), weight, m_.hidden, m_.eps, to);
        normed_rows_.prepare(row, to, then.need);
    }

    // Q, K and V of all rows, their KV written, and the attention's output in attended_.
    void attend(Team& team, const Rows& each_row, const Layer& layer, const Group& group, const int64_t* positions) {
        const auto placed = [&](int64_t r) {
            with_kv(group.kv, [&](auto kv) { place(layer, pages<decltype(kv)>(layer, group), r, positions[r], group.slots[r]); });
        };
        product<T>(team, layer.qkv, normed_rows_.operand(normed_.data()), each_row.rows, StoreFloat{qkv_.data(), qkv_size()},
                   each_row.few(placed));
        each_row.many(placed);
        with_kv(group.kv, [&](auto kv) {
            const auto kept = pages<decltype(kv)>(layer, group);
            run_attention<T, decltype(kv)>(team, {*group.plan, m_.heads, q_.data(), attended_.data(), partials_.data()}, kept,
                                           scratch_[static_cast<size_t>(team.thread())]);
        });
        if (layer.o.need)
            team.each(each_row.rows, each_row.grain,
                      [&](int64_t r) { attended_rows_.prepare(r, &attended_[r * q_size()], layer.o.need); });
    }

    template <class K> Pages<K> pages(const Layer& layer, const Group& group) const {
        return {static_cast<typename K::Stored*>(group.storage) + layer.index * group.layer_stride, group.page_stride,
                group.slots_per_page, m_.kv_heads, m_.dim};
    }

    // One row's Q, K and V: norms, rotation, rounding or codes; Q to its buffer, K and V to their page.
    template <class K> void place(const Layer& layer, const Pages<K>& pages, int64_t row, int64_t position, int64_t slot) {
        const int dim = m_.dim, half = dim / 2;
        float* head = qkv_.data() + row * qkv_size();
        const float *cos = m_.cos + position * half, *sin = m_.sin + position * half;
        typename K::Stored kept[MAX_DIM];
        for (int h = 0; h < m_.heads + 2 * m_.kv_heads; ++h, head += dim) {
            const bool is_q = h < m_.heads, is_k = !is_q && h < m_.heads + m_.kv_heads;
            const float* weight = is_q ? layer.q_norm : is_k ? layer.k_norm : nullptr;
            if (weight) {
                const float scale = inverse_rms(head, dim, m_.eps);
                for (int d = 0; d < dim; ++d) head[d] = head[d] * scale * weight[d];
            }
            if (layer.rotary && (is_q || is_k)) rotate(head, cos, sin, dim);
            if (is_q) {
                round_row<T>(head, dim, q_.data() + row * q_size() + h * dim);
                continue;
            }
            const float scale = keep<T, K>(head, dim, kept);
            if (is_k) pages.write_key(slot, h - m_.heads, kept, scale);
            else pages.write_value(slot, h - m_.heads - m_.kv_heads, kept, scale);
        }
    }
};

}  // namespace agentserve
