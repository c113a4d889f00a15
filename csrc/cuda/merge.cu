#include <algorithm>
#include <type_traits>

#include "attention/checks.h"
#include "cuda/backend.h"
#include "cuda/launch.h"
#include "cuda/merge.cuh"
#include "cuda/rowwise.cuh"

namespace splitkv::cuda {
namespace {

inline constexpr int kChunk = kWarpThreads;  // partials whose weights are in shared memory at once
inline constexpr int kMaxHeadsInCta = 32;

template <typename PartElement, typename OutElement, typename SlotsOf, int kColumns>
struct MergeTraits {
    using Part = PartElement;
    using Out = OutElement;
    using Slots = SlotsOf;
    static constexpr int kVector = kColumns;  // columns of a thread
    // Narrow loads need more threads: the threads of a CTA must cover any row of up to 512 columns.
    static constexpr int kThreads = kColumns == 1 ? 512 : 256;
    // A running result takes part as the first partial and is updated in place.
    static constexpr bool kHasRunning = std::is_same_v<Slots, CsrSlots>;
    static constexpr int kInFlight = 4;  // loads of a thread before the first use
    static_assert(kThreads * kColumns >= kMaxHeadDim, "one head at least in one go");
};

struct MergeSmem {
    float weight[kChunk][kMaxHeadsInCta];
    float running_weight[kMaxHeadsInCta];
    float max[kMaxHeadsInCta];
    float inverse_sum[kMaxHeadsInCta];
    int32_t slot[kChunk];
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

__device__ __forceinline__ float weight_of(float lse, float max, float inverse_sum) {
    return lse == -INFINITY ? 0.0f : expf(lse - max) * inverse_sum;
}

// Maximum and sum of exp(lse - max) over the partials and the running result.
struct Total {
    float max;
    float sum;
};

__device__ __forceinline__ Total total_of(const Rows& part_lse, const SlotList& list, int64_t head,
                                          float running) {
    float max = running;
    for (int i = lane(); i < list.count; i += kWarpThreads) {
        max = fmaxf(max, *row_of<float>(part_lse, list.slot(i), head));
    }
    max = warp_max(max);
    float sum = lane() == 0 ? weight_of(running, max, 1.0f) : 0.0f;
    for (int i = lane(); i < list.count; i += kWarpThreads) {
        sum += weight_of(*row_of<float>(part_lse, list.slot(i), head), max, 1.0f);
    }
    return {max, warp_sum(sum)};
}

// Weights of partials [first, first + count) for head h of the group.
__device__ __forceinline__ void write_weights(const Rows& part_lse, const SlotList& list,
                                              int64_t head, int h, int first, int count,
                                              MergeSmem* smem) {
    if (lane() >= count) return;
    const float part = *row_of<float>(part_lse, list.slot(first + lane()), head);
    smem->weight[lane()][h] = weight_of(part, smem->max[h], smem->inverse_sum[h]);
}

// acc += weight * part for the partials whose weights are in shared memory.
template <typename Traits>
__device__ __forceinline__ void add_parts(const Rows& part_out, const MergeSmem& smem, int64_t head,
                                          int h, int column, int count,
                                          Values<Traits::kVector>* acc) {
    using Part = typename Traits::Part;
    for (int i = 0; i < count; i += Traits::kInFlight) {
        Packed<Part, Traits::kVector> part[Traits::kInFlight];
        float weight[Traits::kInFlight];
#pragma unroll
        for (int j = 0; j < Traits::kInFlight; ++j) {
            weight[j] = i + j < count ? smem.weight[i + j][h] : 0.0f;
            // A weight of 0 also stands for an empty partial, whose values may be NaN: not read.
            if (weight[j] == 0.0f) continue;
            const Part* row = row_of<Part>(part_out, smem.slot[i + j], head);
            part[j] = load_packed<Part, Traits::kVector>(row + column);
        }
#pragma unroll
        for (int j = 0; j < Traits::kInFlight; ++j) {
            if (weight[j] == 0.0f) continue;
            const Values<Traits::kVector> values = unpack<Part, Traits::kVector>(part[j]);
#pragma unroll
            for (int c = 0; c < Traits::kVector; ++c) {
                acc->x[c] = fmaf(weight[j], values.x[c], acc->x[c]);
            }
        }
    }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    merge_kernel(const __grid_constant__ MergeKernelParams<typename Traits::Slots> params) {
    constexpr int kVector = Traits::kVector;
    constexpr int kWarps = Traits::kThreads / kWarpThreads;
    __shared__ MergeSmem smem;
    // The forward that wrote the partials may still be ending.
    if constexpr (!Traits::kHasRunning) cudaGridDependencySynchronize();
    const uint32_t index = blockIdx.x / params.num_groups;
    const int first_head =
        static_cast<int>(blockIdx.x - index * params.num_groups) * params.heads_in_cta;
    const int num_heads = min(params.heads_in_cta, static_cast<int>(params.out.heads) - first_head);
    const SlotList list = list_of(params.slots, index);
    const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;

    for (int h = warp; h < num_heads; h += kWarps) {
        auto* lse = mutable_row_of<float>(params.lse, list.row, first_head + h);
        const float running = Traits::kHasRunning ? *lse : -INFINITY;
        const Total total = total_of(params.part_lse, list, first_head + h, running);
        const bool is_empty = total.max == -INFINITY;
        const float inverse_sum = is_empty ? 0.0f : 1.0f / total.sum;
        if (lane() == 0) {
            smem.max[h] = total.max;
            smem.inverse_sum[h] = inverse_sum;
            smem.running_weight[h] = weight_of(running, total.max, inverse_sum);
            *lse = is_empty ? -INFINITY : total.max + logf(total.sum);
        }
        __syncwarp();
    }

    const int dim = static_cast<int>(params.out.dim);
    const int element = static_cast<int>(threadIdx.x) * kVector;
    const int my_head = element / dim;
    const int column = element - my_head * dim;
    const bool is_inside = my_head < num_heads;
    auto* out = mutable_row_of<typename Traits::Out>(params.out, list.row, first_head + my_head);
    Values<kVector> acc{};
    for (int first = 0; first == 0 || first < list.count; first += kChunk) {
        const int count = min(kChunk, list.count - first);
        if (first > 0) __syncthreads();
        if (warp == 0 && lane() < count) {
            smem.slot[lane()] = static_cast<int32_t>(list.slot(first + lane()));
        }
        for (int h = warp; h < num_heads; h += kWarps) {
            write_weights(params.part_lse, list, first_head + h, h, first, count, &smem);
        }
        __syncthreads();
        if (!is_inside) continue;
        if (Traits::kHasRunning && first == 0 && smem.running_weight[my_head] != 0.0f) {
            acc = load_values<typename Traits::Out, kVector>(out + column);
#pragma unroll
            for (int c = 0; c < kVector; ++c) acc.x[c] *= smem.running_weight[my_head];
        }
        add_parts<Traits>(params.part_out, smem, first_head + my_head, my_head, column, count,
                          &acc);
    }
    if (is_inside) store_values<typename Traits::Out, kVector>(acc, out + column);
}

template <typename Traits>
void launch_merge(MergeKernelParams<typename Traits::Slots> params, void* stream) {
    const int64_t num_heads = params.out.heads;
    if (params.num_rows * num_heads == 0) return;
    const int64_t heads_in_cta = std::min<int64_t>(
        {num_heads, kMaxHeadsInCta, Traits::kThreads * Traits::kVector / params.out.dim});
    params.heads_in_cta = static_cast<int32_t>(heads_in_cta);
    params.num_groups = static_cast<int32_t>((num_heads + heads_in_cta - 1) / heads_in_cta);
    const int64_t num_ctas = params.num_rows * params.num_groups;
    SPLITKV_CHECK(num_ctas < INT32_MAX,
                  "rows * heads is too large for one merge: ", params.num_rows, " * ", num_heads);
    LaunchConfig config{};
    config.grid = dim3(static_cast<unsigned>(num_ctas));
    config.block = dim3(Traits::kThreads);
    config.cluster = no_cluster();
    config.stream = static_cast<cudaStream_t>(stream);
    config.overlaps_previous = !Traits::kHasRunning;
    launch(merge_kernel<Traits>, config, params);
}

template <typename Part>
void merge_csr(const MergeKernelParams<CsrSlots>& params, void* stream) {
    constexpr int kVector = kVectorBytes / sizeof(Part);
    if (is_wide(params.out, kVector) && is_wide(params.part_out, kVector)) {
        launch_merge<MergeTraits<Part, float, CsrSlots, kVector>>(params, stream);
    } else {
        launch_merge<MergeTraits<Part, float, CsrSlots, 1>>(params, stream);
    }
}

template <typename Out>
void merge_strided(const MergeKernelParams<StridedSlots>& params, void* stream) {
    constexpr int kVector = kVectorBytes / sizeof(float);
    launch_merge<MergeTraits<float, Out, StridedSlots, kVector>>(params, stream);
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
    switch (out.dtype) {
        case DType::kFloat32:
            return merge_strided<float>(params, stream);
        case DType::kBFloat16:
            return merge_strided<__nv_bfloat16>(params, stream);
        case DType::kFloat16:
            return merge_strided<__half>(params, stream);
    }
}

void merge(const MergeParams& params) {
    const Rows& out = params.out;
    check_shape("lse", params.lse, out.rows, out.heads, 1);
    check_shape("part_out", params.part_out, params.part_out.rows, out.heads, out.dim);
    check_shape("part_lse", params.part_lse, params.part_out.rows, out.heads, 1);
    check_float32("out", out);
    check_float32("lse", params.lse);
    check_float32("part_lse", params.part_lse);
    const DeviceGuard guard(params.launch.device_index);
    MergeKernelParams<CsrSlots> kernel_params{};
    kernel_params.out = out;
    kernel_params.lse = params.lse;
    kernel_params.part_out = params.part_out;
    kernel_params.part_lse = params.part_lse;
    kernel_params.slots.ptr = params.part_ptr;
    kernel_params.slots.slots = params.part_slots;
    kernel_params.num_rows = out.rows;
    switch (params.part_out.dtype) {
        case DType::kFloat32:
            return merge_csr<float>(kernel_params, params.launch.stream);
        case DType::kBFloat16:
            return merge_csr<__nv_bfloat16>(kernel_params, params.launch.stream);
        case DType::kFloat16:
            return merge_csr<__half>(kernel_params, params.launch.stream);
    }
}

}  // namespace splitkv::cuda
