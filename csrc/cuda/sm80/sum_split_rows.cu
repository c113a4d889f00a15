// Joins the dq of rows whose keys were split over several items.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/sm80/partial_bwd.h"

namespace splitkv::sm80 {
namespace {

constexpr int kThreads = 256;

struct SumKernelParams {
    Rows target;                 // [Tq, Hq, D], fp32, contiguous
    Rows parts;                  // [part rows, Hq, D], fp32, contiguous
    const cuda::MergeRow* rows;  // [num_rows]
    int64_t num_vectors;         // of 4 values, in all rows
};

// One thread for 4 values of a row.
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const __grid_constant__ SumKernelParams params) {
    const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (index >= params.num_vectors) return;
    const int64_t vectors_per_row = params.target.row_stride / 4;
    const cuda::MergeRow row = params.rows[index / vectors_per_row];
    const int64_t vector = index % vectors_per_row;
    const auto* parts = static_cast<const float4*>(params.parts.data) + vector;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < row.num_parts; ++i) {
        const int64_t part = row.first_part + int64_t{i} * row.stride;
        const float4 x = parts[part * vectors_per_row];
        sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    }
    static_cast<float4*>(params.target.data)[row.row * vectors_per_row + vector] = sum;
}

}  // namespace

void sum_split_rows(const Rows& target, const Rows& parts, const cuda::MergeRow* rows,
                    int64_t num_rows, void* stream) {
    if (num_rows == 0) return;
    SumKernelParams params{};
    params.target = target;
    params.parts = parts;
    params.rows = rows;
    params.target.row_stride = target.heads * target.dim;
    params.num_vectors = num_rows * target.heads * target.dim / 4;
    cuda::LaunchConfig config{};
    config.grid = dim3(static_cast<unsigned>((params.num_vectors + kThreads - 1) / kThreads));
    config.block = dim3(kThreads);
    config.cluster = cuda::no_cluster();
    config.stream = static_cast<cudaStream_t>(stream);
    cuda::launch(sum_kernel, config, params);
}

}  // namespace splitkv::sm80
