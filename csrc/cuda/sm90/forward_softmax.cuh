// Online softmax of one warpgroup's 64 rows, on wgmma accumulators.
//
// A thread holds two rows, `lane / 4` and 8 below it, and of each the columns 8 j + 2 (lane % 4)
// and the next one. Registers 4 j and 4 j + 1 are the first row, 4 j + 2 and 4 j + 3 the second.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/sm90/ptx.cuh"

namespace splitkv::sm90 {

inline constexpr int kRowsPerThread = 2;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// The keys that a thread's rows see.
struct RowIntervals {
    int32_t begin[kRowsPerThread];
    uint32_t length[kRowsPerThread];  // 0 for a row that sees no key

    SPLITKV_DEVICE bool is_empty(int row) const { return length[row] == 0; }
};

struct SoftmaxState {
    float max[kRowsPerThread];  // of the raw scores, over all columns of the row
    float sum[kRowsPerThread];  // of exponentials, over this thread's columns

    SPLITKV_DEVICE void reset() {
        max[0] = max[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
    }
};

// -inf - (-inf) is NaN: a row without any finite score is shifted by 0 instead of its maximum.
SPLITKV_DEVICE float finite_shift(float max, float scale) {
    return max == -INFINITY ? 0.0f : max * scale;
}

// Sets scores of hidden keys to -inf; first_key is the key of column 0.
template <int kRegisters>
SPLITKV_DEVICE void mask_scores(const RowIntervals& rows, int first_key, float (&s)[kRegisters]) {
    const int column = first_key + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
        const int offset = column - rows.begin[row];
#pragma unroll
        for (int j = 0; j < kRegisters / 4; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                // One unsigned comparison for both ends of the interval.
                if (static_cast<uint32_t>(offset + 8 * j + e) >= rows.length[row]) {
                    s[4 * j + 2 * row + e] = -INFINITY;
                }
            }
        }
    }
}

// Updates the maxima; returns the shift of each row's exponents, and in alpha the factor for what
// was summed under the old maximum.
template <int kRegisters>
SPLITKV_DEVICE void update_max(const float (&s)[kRegisters], float scale, SoftmaxState* state,
                               float (&shift)[kRowsPerThread], float (&alpha)[kRowsPerThread]) {
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
        float max = state->max[row];
#pragma unroll
        for (int j = 0; j < kRegisters / 4; ++j) {
            max = fmaxf(max, fmaxf(s[4 * j + 2 * row], s[4 * j + 2 * row + 1]));
        }
        max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 1));
        max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 2));
        shift[row] = finite_shift(max, scale);
        alpha[row] = ptx::ex2_approx(fmaf(state->max[row], scale, -shift[row]));
        state->max[row] = max;
    }
}

// Scores [4 first, 4 last) of one row to exponentials, adding them to the row's sum one by one: a
// running chain that starts at the old sum times alpha forces alpha early, and with it the
// rescaling of the output, which then runs between the exponentials (5 % of the whole forward).
template <int kRegisters>
SPLITKV_DEVICE void exponentiate(int row, int first, int last, float scale, float shift,
                                 float (&s)[kRegisters], SoftmaxState* state) {
#pragma unroll
    for (int j = 0; j < kRegisters / 4; ++j) {
        if (j < first || j >= last) continue;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float& x = s[4 * j + 2 * row + e];
            x = ptx::ex2_approx(fmaf(x, scale, -shift));
            state->sum[row] += x;
        }
    }
}

template <int kRegisters>
SPLITKV_DEVICE void rescale(const float (&alpha)[kRowsPerThread], float (&o)[kRegisters]) {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) o[i] *= alpha[i / 2 % 2];
}

// Accumulator registers are the A operand of the next wgmma, once rounded to 16 bits.
template <typename Element, int kRegisters>
SPLITKV_DEVICE void pack_probs(const float (&s)[kRegisters], uint32_t (&p)[kRegisters / 8][4]) {
#pragma unroll
    for (int k = 0; k < kRegisters / 8; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            p[k][i] = ptx::cvt_rn_x2<Element>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
        }
    }
}

SPLITKV_DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(kAllLanes, x, 1);
    return x + __shfl_xor_sync(kAllLanes, x, 2);
}

}  // namespace splitkv::sm90
