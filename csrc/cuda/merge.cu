#include <algorithm>
#include <type_traits>

#include "attention/checks.h"
#include "cuda/backend.h"
#include "cuda/launch.h"
#include "cuda/merge.cuh"
#include "cuda/rowwise.cuh"

namespace splitkv::cuda {
namespace {

template <typename PartElement, typename SlotsOf, int kColumns, int kPartsInFlight>
struct MergeTraits {
    using Part = PartElement;
    using Slots = SlotsOf;
    static constexpr int kVector = kColumns;  // columns of a thread
    // A running result, in fp32, takes part as the first partial and is updated in place.
    static constexpr bool kMayHaveRunning = std::is_same_v<Slots, CsrSlots>;
    static constexpr int kInFlight = kPartsInFlight;
    // A CTA holds whole heads, as many as fit the usual number of threads: few, so that a merge of
    // few rows still uses many SMs. A head of 512 columns loaded one by one needs the most.
    static constexpr int kUsualThreads = 128;
    static constexpr int kMaxThreads = kVector == 1 ? 512 : 128;
    static_assert(kMaxThreads * kVector >= kMaxHeadDim, "one head fits a CTA");
};

// The partials of one row: where they are, and how many.
struct SlotList {
    const int32_t* slots;  // nullptr: first + i * stride
    int32_t first;
    int32_t stride;
    int32_t count;
    int64_t row;

    __device__ __forceinline__ int64_t slot(int i) const {
        return slots != nullptr ? slots[i] : static_cast<int64_t>(first) + int64_t{i} * stride;
    }
};

__device__ __forceinline__ SlotList list_of(const CsrSlots& slots, int64_t index) {
    const int32_t first = slots.ptr[index];
    return {slots.slots + first, 0, 0, slots.ptr[index + 1] - first, index};
}

__device__ __forceinline__ SlotList list_of(const StridedSlots& slots, int64_t index) {
    const int4 row = *reinterpret_cast<const int4*>(slots.rows + index);
    return {nullptr, row.y, row.w, row.z, row.x};
}

// Weighted sum of the partials so far, relative to the largest lse so far.
template <int kVector>
struct Merged {
    float max;
    float sum;
    Values<kVector> out;

    __device__ __forceinline__ Merged() : max(-INFINITY), sum(0.0f) {
        // -0, not 0: x + -0 is x for every x, so that a lone partial is kept bitwise.
#pragma unroll
        for (int c = 0; c < kVector; ++c) out.x[c] = -0.0f;
    }

    // Moves the reference up to new_max.
    __device__ __forceinline__ void rescale(float new_max) {
        if (new_max == -INFINITY) return;
        const float factor = expf(max - new_max);
        max = new_max;
        sum *= factor;
#pragma unroll
        for (int c = 0; c < kVector; ++c) out.x[c] *= factor;
    }

    // An empty partial counts for nothing, whatever its values are.
    __device__ __forceinline__ void add(float lse, float scale, const Values<kVector>& part) {
        if (lse == -INFINITY) return;
        const float weight = expf(lse - max);
        sum += weight;
        const float factor = weight * scale;
#pragma unroll
        for (int c = 0; c < kVector; ++c) out.x[c] = fmaf(factor, part.x[c], out.x[c]);
    }
};

// Adds partials [first, first + kInFlight) of the list, as far as there are.
template <typename Traits>
__device__ __forceinline__ void add_parts(const MergeKernelParams<typename Traits::Slots>& params,
                                          const SlotList& list, int first, int64_t head, int column,
                                          Merged<Traits::kVector>* merged) {
    using Part = typename Traits::Part;
    Packed<Part, Traits::kVector> part[Traits::kInFlight];
    float lse[Traits::kInFlight];
    float scale[Traits::kInFlight];
    const Scales scales(params.part_scale);
    float max = merged->max;
#pragma unroll
    for (int j = 0; j < Traits::kInFlight; ++j) {
        lse[j] = -INFINITY;
        if (first + j >= list.count) continue;
        const int64_t slot = list.slot(first + j);
        lse[j] = *row_of<float>(params.part_lse, slot, head);
        scale[j] = scales.of(slot, head);
        part[j] =
            load_packed<Part, Traits::kVector>(row_of<Part>(params.part_out, slot, head) + column);
    }
#pragma unroll
    for (int j = 0; j < Traits::kInFlight; ++j) max = fmaxf(max, lse[j]);
    merged->rescale(max);
#pragma unroll
    for (int j = 0; j < Traits::kInFlight; ++j) {
        merged->add(lse[j], scale[j], unpack<Part, Traits::kVector>(part[j]));
    }
}

// Waits for what the kernel before wrote, where this one may have started early.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kMaxThreads)
    merge_kernel(const __grid_constant__ MergeKernelParams<typename Traits::Slots> params) {
    constexpr int kVector = Traits::kVector;
    const uint32_t threads_per_head = static_cast<uint32_t>(params.out.dim) / kVector;
    const uint32_t head_in_cta = threadIdx.x / threads_per_head;
    const int column = static_cast<int>(threadIdx.x - head_in_cta * threads_per_head) * kVector;
    const uint32_t index = blockIdx.x * (blockDim.x / threads_per_head) + head_in_cta;
    const uint32_t num_heads = static_cast<uint32_t>(params.out.heads);
    const uint32_t row_index = index / num_heads;
    const uint32_t head = index - row_index * num_heads;
    const bool is_inside = row_index < params.num_rows;

    const SlotList list = list_of(params.slots, is_inside ? row_index : 0);
    // The forward that wrote the partials may still be ending; the list above is older than it.
    if constexpr (!Traits::kMayHaveRunning) wait_for_previous_kernel();
    float* lse = mutable_row_of<float>(params.lse, list.row, head);
    const bool has_running = Traits::kMayHaveRunning && params.accumulates;
    const float running = has_running ? *lse : -INFINITY;
    const bool is_alone = list.count == 0 && isfinite(running);  // and stays as it is
    // On its way before the barrier.
    Packed<float, kVector> running_out{};
    if (has_running && list.count > 0) {
        running_out =
            load_packed<float, kVector>(row_of<float>(params.out, list.row, head) + column);
    }
    // lse is written below, by one thread of the head, when all have read it.
    if constexpr (Traits::kMayHaveRunning) __syncthreads();
    if (!is_inside || is_alone) return;
    Merged<kVector> merged;
    if constexpr (Traits::kMayHaveRunning) {
        merged.rescale(running);
        merged.add(running, 1.0f, unpack<float, kVector>(running_out));
    }
    for (int first = 0; first < list.count; first += Traits::kInFlight) {
        add_parts<Traits>(params, list, first, head, column, &merged);
    }
    // The largest lse has weight 1. Not max == -INFINITY, which also holds beside NaN.
    const bool is_empty = merged.sum == 0.0f;
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
        merged.out.x[c] = is_empty ? 0.0f : merged.out.x[c] / merged.sum;
    }
    store_values_as(merged.out, params.out, list.row, head, column);
    if (column == 0) *lse = is_empty ? -INFINITY : merged.max + logf(merged.sum);
}

template <typename Traits>
void launch_merge(const MergeKernelParams<typename Traits::Slots>& params, void* stream) {
    const int64_t num_heads = params.num_rows * params.out.heads;
    if (num_heads == 0) return;
    SPLITKV_CHECK(num_heads < INT32_MAX, "one merge takes less than 2^31 (row, head) pairs, got ",
                  params.num_rows, " rows of ", params.out.heads, " heads");
    const int64_t threads_per_head = params.out.dim / Traits::kVector;
    const int64_t heads_in_cta = std::max<int64_t>(1, Traits::kUsualThreads / threads_per_head);
    LaunchConfig config{};
    config.grid = dim3(static_cast<unsigned>((num_heads + heads_in_cta - 1) / heads_in_cta));
    config.block = dim3(static_cast<unsigned>(heads_in_cta * threads_per_head));
    config.cluster = no_cluster();
    config.stream = static_cast<cudaStream_t>(stream);
    config.overlaps_previous = !Traits::kMayHaveRunning;
    launch(merge_kernel<Traits>, config, params);
}

template <typename Part, int kInFlight>
void merge_csr(const MergeKernelParams<CsrSlots>& params, void* stream) {
    constexpr int kVector = kVectorBytes / sizeof(Part);
    if (is_wide(params.out, kVector) && is_wide(params.part_out, kVector)) {
        launch_merge<MergeTraits<Part, CsrSlots, kVector, kInFlight>>(params, stream);
    } else {
        launch_merge<MergeTraits<Part, CsrSlots, 1, kInFlight>>(params, stream);
    }
}

template <typename Part>
void merge_csr_of(const MergeKernelParams<CsrSlots>& params, int64_t num_slots, void* stream) {
    if (has_few_parts(num_slots, params.num_rows)) {
        merge_csr<Part, kFewInFlight>(params, stream);
    } else {
        merge_csr<Part, kManyInFlight>(params, stream);
    }
}

}  // namespace

void merge_split_rows(const Rows& out, const Rows& lse, const Rows& part_out, const Rows& part_lse,
                      const MergeRow* rows, int64_t num_rows, void* stream) {
    MergeKernelParams<StridedSlots> params{};
    params.out = out;
    params.lse = lse;
    params.part_out = part_out;
    params.part_lse = part_lse;
    params.slots.rows = rows;
    params.num_rows = num_rows;
    constexpr int kVector = kVectorBytes / sizeof(float);
    launch_merge<MergeTraits<float, StridedSlots, kVector, kManyInFlight>>(params, stream);
}

void merge(const MergeParams& params) {
    const Rows& out = params.out;
    const DeviceGuard guard(params.launch.device_index);
    MergeKernelParams<CsrSlots> kernel_params{};
    kernel_params.out = out;
    kernel_params.lse = params.lse;
    kernel_params.part_out = params.part_out;
    kernel_params.part_lse = params.part_lse;
    kernel_params.part_scale = params.part_scale;
    kernel_params.slots.ptr = params.part_ptr;
    kernel_params.slots.slots = params.part_slots;
    kernel_params.num_rows = out.rows;
    kernel_params.accumulates = params.accumulates;
    void* stream = params.launch.stream;
    switch (params.part_out.dtype) {
        case DType::kFloat32:
            return merge_csr_of<float>(kernel_params, params.num_slots, stream);
        case DType::kBFloat16:
            return merge_csr_of<__nv_bfloat16>(kernel_params, params.num_slots, stream);
        case DType::kFloat16:
            return merge_csr_of<__half>(kernel_params, params.num_slots, stream);
    }
}

}  // namespace splitkv::cuda
