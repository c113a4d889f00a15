// row_dot: delta of the backward, one pass over memory. One warp for each (row, head).
#include "attention/checks.h"
#include "cuda/backend.h"
#include "cuda/launch.h"
#include "cuda/rowwise.cuh"

namespace splitkv::cuda {
namespace {

struct RowDotParams {
    Rows a;     // [T, H, D], any dtype
    Rows b;     // [T, H, D], any dtype
    Rows sums;  // [T, H, 1], fp32
};

// The dtype is the same for all threads, so the branch costs nothing beside the load.
template <int kVector>
__device__ __forceinline__ Values<kVector> load_any(const Rows& tensor, int64_t row, int64_t head,
                                                    int column) {
    switch (tensor.dtype) {
        case DType::kBFloat16:
            return load_values<__nv_bfloat16, kVector>(row_of<__nv_bfloat16>(tensor, row, head) +
                                                       column);
        case DType::kFloat16:
            return load_values<__half, kVector>(row_of<__half>(tensor, row, head) + column);
        default:
            return load_values<float, kVector>(row_of<float>(tensor, row, head) + column);
    }
}

template <int kVector>
__global__ void __launch_bounds__(kWarpThreads* kWarpsPerCta)
    row_dot_kernel(const __grid_constant__ RowDotParams params) {
    const uint32_t index = global_warp();
    const auto heads = static_cast<uint32_t>(params.a.heads);
    if (index >= params.a.rows * heads) return;
    const int64_t row = index / heads;
    const int64_t head = index % heads;
    float sum = 0.0f;
    for (int column = lane() * kVector; column < params.a.dim; column += kWarpThreads * kVector) {
        const Values<kVector> a = load_any<kVector>(params.a, row, head, column);
        const Values<kVector> b = load_any<kVector>(params.b, row, head, column);
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum = fmaf(a.x[i], b.x[i], sum);
    }
    sum = warp_sum(sum);
    if (lane() == 0) *mutable_row_of<float>(params.sums, row, head) = sum;
}

}  // namespace

void row_dot(const Rows& a, const Rows& b, const Rows& sums, const Launch& where) {
    check_shape("b", b, a.rows, a.heads, a.dim);
    check_shape("sums", sums, a.rows, a.heads, 1);
    check_float32("sums", sums);
    if (a.rows * a.heads == 0) return;
    const DeviceGuard guard(where.device_index);
    RowDotParams params{};
    params.a = a;
    params.b = b;
    params.sums = sums;
    constexpr int kWideVector = 4;  // 16 bytes of fp32, 8 of a 16-bit format
    const bool wide = is_wide(a, kWideVector) && is_wide(b, kWideVector);
    launch(wide ? row_dot_kernel<kWideVector> : row_dot_kernel<1>,
           one_warp_per_row_head(a.rows, a.heads, where.stream), params);
}

}  // namespace splitkv::cuda
