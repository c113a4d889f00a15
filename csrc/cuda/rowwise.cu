// row_dot: delta of the backward, one pass over memory. A warp owns four (row, head) pairs, whose
// loads are in flight together.
#include "attention/checks.h"
#include "cuda/backend.h"
#include "cuda/launch.h"
#include "cuda/rowwise.cuh"

namespace splitkv::cuda {
namespace {

constexpr int kPairsPerWarp = 4;
constexpr int kWideVector = 4;  // 16 bytes of fp32, 8 of a 16-bit format

struct RowDotParams {
    Rows a;     // [T, H, D]
    Rows b;     // [T, H, D]
    Rows sums;  // [T, H, 1], fp32
};

template <typename ElementA, typename ElementB, int kColumns>
struct RowDotTraits {
    using A = ElementA;
    using B = ElementB;
    static constexpr int kVector = kColumns;
};

// Row and head of the i-th pair of a warp.
struct Pair {
    uint32_t row;
    uint32_t head;
    bool is_inside;
};

__device__ __forceinline__ Pair pair_of(const RowDotParams& params, int i) {
    const auto heads = static_cast<uint32_t>(params.a.heads);
    const uint32_t index = global_warp() * kPairsPerWarp + i;
    const uint32_t row = index / heads;
    return {row, index - row * heads, row < params.a.rows};
}

template <typename Traits>
__global__ void __launch_bounds__(kWarpThreads* kWarpsPerCta)
    row_dot_kernel(const __grid_constant__ RowDotParams params) {
    using A = typename Traits::A;
    using B = typename Traits::B;
    constexpr int kVector = Traits::kVector;
    float sums[kPairsPerWarp] = {};
    for (int column = lane() * kVector; column < params.a.dim; column += kWarpThreads * kVector) {
        Packed<A, kVector> a[kPairsPerWarp];
        Packed<B, kVector> b[kPairsPerWarp];
#pragma unroll
        for (int i = 0; i < kPairsPerWarp; ++i) {
            const Pair pair = pair_of(params, i);
            if (!pair.is_inside) continue;
            a[i] = load_packed<A, kVector>(row_of<A>(params.a, pair.row, pair.head) + column);
            b[i] = load_packed<B, kVector>(row_of<B>(params.b, pair.row, pair.head) + column);
        }
#pragma unroll
        for (int i = 0; i < kPairsPerWarp; ++i) {
            const Values<kVector> values_a = unpack<A, kVector>(a[i]);
            const Values<kVector> values_b = unpack<B, kVector>(b[i]);
#pragma unroll
            for (int c = 0; c < kVector; ++c) {
                sums[i] = fmaf(values_a.x[c], values_b.x[c], sums[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kPairsPerWarp; ++i) {
        const float sum = warp_sum(sums[i]);
        const Pair pair = pair_of(params, i);
        if (lane() == 0 && pair.is_inside) {
            *mutable_row_of<float>(params.sums, pair.row, pair.head) = sum;
        }
    }
}

template <typename A, typename B>
void launch_row_dot(const RowDotParams& params, void* stream) {
    const int64_t num_pairs = params.a.rows * params.a.heads;
    SPLITKV_CHECK(num_pairs < INT32_MAX, "rows * heads is ", num_pairs,
                  ", needs less than 2^31 - 1");
    constexpr int kPairsPerCta = kPairsPerWarp * kWarpsPerCta;
    LaunchConfig config{};
    config.grid = dim3(static_cast<unsigned>((num_pairs + kPairsPerCta - 1) / kPairsPerCta));
    config.block = dim3(kWarpThreads * kWarpsPerCta);
    config.cluster = no_cluster();
    config.stream = static_cast<cudaStream_t>(stream);
    if (is_wide(params.a, kWideVector) && is_wide(params.b, kWideVector)) {
        launch(row_dot_kernel<RowDotTraits<A, B, kWideVector>>, config, params);
    } else {
        launch(row_dot_kernel<RowDotTraits<A, B, 1>>, config, params);
    }
}

// The mixed case that occurs: a gradient in the input dtype, the merged output in fp32.
template <typename A>
void launch_row_dot_of(const RowDotParams& params, void* stream) {
    if (params.b.dtype == DType::kFloat32) {
        launch_row_dot<A, float>(params, stream);
    } else {
        launch_row_dot<A, A>(params, stream);
    }
}

}  // namespace

void row_dot(const Rows& a, const Rows& b, const Rows& sums, const Launch& where) {
    check_shape("b", b, a.rows, a.heads, a.dim);
    check_shape("sums", sums, a.rows, a.heads, 1);
    check_float32("sums", sums);
    // Either may be the wider one; the product is the same.
    const bool is_swapped = a.dtype == DType::kFloat32;
    RowDotParams params{};
    params.a = is_swapped ? b : a;
    params.b = is_swapped ? a : b;
    params.sums = sums;
    SPLITKV_CHECK(params.b.dtype == DType::kFloat32 || params.a.dtype == params.b.dtype,
                  "one of the two is bfloat16, the other float16; convert one");
    if (a.rows * a.heads == 0) return;
    const DeviceGuard guard(where.device_index);
    switch (params.a.dtype) {
        case DType::kFloat32:
            return launch_row_dot_of<float>(params, where.stream);
        case DType::kBFloat16:
            return launch_row_dot_of<__nv_bfloat16>(params, where.stream);
        case DType::kFloat16:
            return launch_row_dot_of<__half>(params, where.stream);
    }
}

}  // namespace splitkv::cuda
