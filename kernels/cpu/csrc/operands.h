// What products with block weights need to know of their operand rows, per unit of 32 along k:
// sums, which offsets are multiplied with, and for 8-bit products the row in 8 bits.
//
// The rule for 8 bits is that of `Activations` in kernels/ops.py.
#pragma once

#include <vector>

#include "panels.h"

namespace agentserve {

constexpr float TINY = 1e-36f;  // 127 / TINY is still a number

// `rows` rows of operands as a product reads them. Pointers beside `lanes` are null where not needed.
struct Operand {
    const uint32_t* lanes;
    int64_t stride;             // lanes between rows
    const float* sums;          // [rows][units]: of the numbers, or of scale * codes
    const uint32_t* codes;      // [rows][units * 8], four codes in a lane, 128 added to each
    const float* scales;        // [rows][units]
};

struct RoundedUnit {
    float scale, sum;
};

// 32 numbers as codes, with 128 added to each; their scale, and their sum.
template <class T> INLINE RoundedUnit round_unit(const typename T::Stored* x, uint8_t* codes) {
    vi top = set1_lanes(0), sum = set1_lanes(0);
    for (int i = 0; i < UNIT; i += W) top = max_bits(top, magnitude(T::load_wide(x + i)));
    const float most = max_bits_of(top), scale = most < TINY ? 0.0f : most / 127.0f, inverse = most < TINY ? 0.0f : 127.0f / most;
    for (int i = 0; i < UNIT; i += W) {
        const vi code = to_int(nearest(mul(T::load_wide(x + i), set1(inverse))));
        store_bytes(codes + i, add_lanes(code, set1_lanes(128)));
        sum = add_lanes(sum, code);
    }
    return {scale, scale * static_cast<float>(sum_ints(sum))};
}

template <class T> INLINE float unit_sum(const typename T::Stored* x) {
    vf sum = T::load_wide(x);
    for (int i = W; i < UNIT; i += W) sum = add(sum, T::load_wide(x + i));
    return sum_lanes(sum);
}

// The rows of one buffer of operands, `[rows][width]` numbers of T. Whoever writes a row calls
// `prepare` for it, before the product that needs it.
template <class T> class OperandRows {
public:
    using Stored = typename T::Stored;

    // Room for what a product with `need` reads.
    void fit(int64_t rows, int64_t width, int32_t need) {
        width_ = width;
        units_ = width / UNIT;
        const auto grow = [](auto& v, int64_t n) { if (v.size() < static_cast<size_t>(n)) v.resize(static_cast<size_t>(n)); };
        if (need != NOTHING_MORE) grow(sums_, rows * units_);
        if (need != CODES) return;
        grow(scales_, rows * units_);
        grow(codes_, rows * units_ * UNIT / 4);
    }

    void prepare(int64_t row, const Stored* x, int32_t need) {
        const int64_t at = row * units_;
        for (int64_t u = 0; need != NOTHING_MORE && u < units_; ++u) {
            if (need == SUMS) {
                sums_[at + u] = unit_sum<T>(x + u * UNIT);
                continue;
            }
            const RoundedUnit unit = round_unit<T>(x + u * UNIT, reinterpret_cast<uint8_t*>(codes_.data()) + (at + u) * UNIT);
            scales_[at + u] = unit.scale;
            sums_[at + u] = unit.sum;
        }
    }

    Operand operand(const Stored* rows) const {
        return {reinterpret_cast<const uint32_t*>(rows), width_ / T::PAIR, sums_.data(), codes_.data(), scales_.data()};
    }

private:
    int64_t width_ = 0, units_ = 0;
    std::vector<float> sums_, scales_;
    std::vector<uint32_t> codes_;
};

}  // namespace agentserve
