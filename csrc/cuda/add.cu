// add: sums partials into the rows they belong to, in the order of their slots. The twin of merge
// for what joins by addition, the gradients of queries. Each thread owns 16 bytes of a partial's
// head, several partials in flight; the total is read and written once, and only where there is a
// partial, or written alone.
#include <algorithm>

#include "attention/checks.h"
#include "cuda/backend.h"
#include "cuda/launch.h"
#include "cuda/rowwise.cuh"

namespace splitkv::cuda {
namespace {

constexpr int kUsualThreads = 128;  // of a CTA: whole heads, as many as fit

template <typename PartElement, int kColumns, int kPartsInFlight>
struct AddTraits {
    using Part = PartElement;
    static constexpr int kVector = kColumns;  // columns of a thread
    static constexpr int kInFlight = kPartsInFlight;
    static constexpr int kMaxThreads = kVector == 1 ? 512 : kUsualThreads;
    static_assert(kMaxThreads * kVector >= kMaxHeadDim, "one head fits a CTA");
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kMaxThreads)
    add_kernel(const __grid_constant__ AddParams params) {
    using Part = typename Traits::Part;
    constexpr int kVector = Traits::kVector;
    const uint32_t threads_per_head = static_cast<uint32_t>(params.total.dim) / kVector;
    const uint32_t head_in_cta = threadIdx.x / threads_per_head;
    const int column = static_cast<int>(threadIdx.x - head_in_cta * threads_per_head) * kVector;
    const uint32_t index = blockIdx.x * (blockDim.x / threads_per_head) + head_in_cta;
    const uint32_t num_heads = static_cast<uint32_t>(params.total.heads);
    const uint32_t row = index / num_heads;
    const uint32_t head = index - row * num_heads;
    if (row >= params.total.rows) return;
    const int32_t begin = params.part_ptr[row];
    const int32_t end = params.part_ptr[row + 1];
    if (begin == end && params.accumulates) return;

    const Scales scales(params.part_scale);
    Values<kVector> sum{};
    if (params.accumulates) {
        sum = load_values<float, kVector>(row_of<float>(params.total, row, head) + column);
    }
    for (int32_t first = begin; first < end; first += Traits::kInFlight) {
        Packed<Part, kVector> part[Traits::kInFlight];
        float scale[Traits::kInFlight];
#pragma unroll
        for (int j = 0; j < Traits::kInFlight; ++j) {
            if (first + j >= end) continue;
            const int64_t slot = params.part_slots[first + j];
            scale[j] = scales.of(slot, head);
            part[j] = load_packed<Part, kVector>(row_of<Part>(params.parts, slot, head) + column);
        }
#pragma unroll
        for (int j = 0; j < Traits::kInFlight; ++j) {
            if (first + j >= end) continue;
            const Values<kVector> values = unpack<Part, kVector>(part[j]);
#pragma unroll
            for (int c = 0; c < kVector; ++c) sum.x[c] = fmaf(scale[j], values.x[c], sum.x[c]);
        }
    }
    store_values_as(sum, params.total, row, head, column);
}

template <typename Traits>
void launch_add(const AddParams& params) {
    const int64_t num_heads = params.total.rows * params.total.heads;
    SPLITKV_CHECK(num_heads < INT32_MAX, "one sum takes less than 2^31 (row, head) pairs, got ",
                  params.total.rows, " rows of ", params.total.heads, " heads");
    const int64_t threads_per_head = params.total.dim / Traits::kVector;
    const int64_t heads_in_cta = std::max<int64_t>(1, kUsualThreads / threads_per_head);
    LaunchConfig config{};
    config.grid = dim3(static_cast<unsigned>((num_heads + heads_in_cta - 1) / heads_in_cta));
    config.block = dim3(static_cast<unsigned>(heads_in_cta * threads_per_head));
    config.cluster = no_cluster();
    config.stream = static_cast<cudaStream_t>(params.launch.stream);
    launch(add_kernel<Traits>, config, params);
}

template <typename Part, int kInFlight>
void launch_add_wide(const AddParams& params) {
    constexpr int kVector = kVectorBytes / sizeof(Part);
    if (is_wide(params.total, kVector) && is_wide(params.parts, kVector)) {
        launch_add<AddTraits<Part, kVector, kInFlight>>(params);
    } else {
        launch_add<AddTraits<Part, 1, kInFlight>>(params);
    }
}

template <typename Part>
void launch_add_of(const AddParams& params) {
    if (has_few_parts(params.num_slots, params.total.rows)) {
        launch_add_wide<Part, kFewInFlight>(params);
    } else {
        launch_add_wide<Part, kManyInFlight>(params);
    }
}

}  // namespace

void add(const AddParams& params) {
    if (params.total.rows * params.total.heads == 0) return;
    const DeviceGuard guard(params.launch.device_index);
    switch (params.parts.dtype) {
        case DType::kFloat32:
            return launch_add_of<float>(params);
        case DType::kBFloat16:
            return launch_add_of<__nv_bfloat16>(params);
        case DType::kFloat16:
            return launch_add_of<__half>(params);
    }
}

}  // namespace splitkv::cuda
