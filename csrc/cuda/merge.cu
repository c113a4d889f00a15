#include <type_traits>

#include "attention/checks.h"
#include "cuda/backend.h"
#include "cuda/launch.h"
#include "cuda/merge.cuh"
#include "cuda/rowwise.cuh"

namespace splitkv::cuda {
namespace {

template <typename PartElement, typename OutElement, typename SlotsOf, int kColumns>
struct MergeTraits {
    using Part = PartElement;
    using Out = OutElement;
    using Slots = SlotsOf;
    static constexpr int kVector = kColumns;
    // A running result takes part as the first partial and is updated in place.
    static constexpr bool kHasRunning = std::is_same_v<Slots, CsrSlots>;
    static constexpr int kInFlight = 4;  // loads of a lane before the first use
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

// acc += weight * part for the partials [first, first + count), whose weights the lanes hold.
template <typename Traits>
__device__ __forceinline__ void add_parts(const Rows& part_out, const SlotList& list, int64_t head,
                                          int first, int count, float my_weight, int column,
                                          bool is_inside, Values<Traits::kVector>* acc) {
    for (int i = 0; i < count; i += Traits::kInFlight) {
        Values<Traits::kVector> part[Traits::kInFlight];
        float weight[Traits::kInFlight];
#pragma unroll
        for (int j = 0; j < Traits::kInFlight; ++j) {
            const bool is_part = i + j < count;
            weight[j] = __shfl_sync(kAllLanes, my_weight, is_part ? i + j : 0);
            if (!is_part) weight[j] = 0.0f;
            // A weight of 0 also stands for an empty partial, whose values may be NaN: not read.
            if (is_inside && weight[j] != 0.0f) {
                const auto* row =
                    row_of<typename Traits::Part>(part_out, list.slot(first + i + j), head);
                part[j] = load_values<typename Traits::Part, Traits::kVector>(row + column);
            }
        }
#pragma unroll
        for (int j = 0; j < Traits::kInFlight; ++j) {
            if (is_inside && weight[j] != 0.0f) {
#pragma unroll
                for (int c = 0; c < Traits::kVector; ++c) {
                    acc->x[c] = fmaf(weight[j], part[j].x[c], acc->x[c]);
                }
            }
        }
    }
}

template <typename Traits>
__global__ void __launch_bounds__(kWarpThreads* kWarpsPerCta)
    merge_kernel(const __grid_constant__ MergeKernelParams<typename Traits::Slots> params) {
    constexpr int kVector = Traits::kVector;
    const uint32_t index = global_warp();
    const auto heads = static_cast<uint32_t>(params.out.heads);
    if (index >= params.num_rows * heads) return;
    const int64_t head = index % heads;
    const SlotList list = list_of(params.slots, index / heads);
    auto* lse = mutable_row_of<float>(params.lse, list.row, head);
    auto* out = mutable_row_of<typename Traits::Out>(params.out, list.row, head);
    const float running = Traits::kHasRunning ? *lse : -INFINITY;
    const Total total = total_of(params.part_lse, list, head, running);
    const bool is_empty = total.max == -INFINITY;
    const float inverse_sum = is_empty ? 0.0f : 1.0f / total.sum;
    __syncwarp();
    if (lane() == 0) *lse = is_empty ? -INFINITY : total.max + logf(total.sum);

    const int num_columns = static_cast<int>(params.out.dim);
    for (int base = 0; base < num_columns; base += kWarpThreads * kVector) {
        const int column = base + lane() * kVector;
        const bool is_inside = column < num_columns;
        Values<kVector> acc{};
        const float running_weight = weight_of(running, total.max, inverse_sum);
        if (Traits::kHasRunning && is_inside && running_weight != 0.0f) {
            acc = load_values<typename Traits::Out, kVector>(out + column);
#pragma unroll
            for (int c = 0; c < kVector; ++c) acc.x[c] *= running_weight;
        }
        for (int first = 0; first < list.count; first += kWarpThreads) {
            const int count = min(kWarpThreads, list.count - first);
            float my_weight = 0.0f;
            if (lane() < count) {
                const float part = *row_of<float>(params.part_lse, list.slot(first + lane()), head);
                my_weight = weight_of(part, total.max, inverse_sum);
            }
            add_parts<Traits>(params.part_out, list, head, first, count, my_weight, column,
                              is_inside, &acc);
        }
        if (is_inside) store_values<typename Traits::Out, kVector>(acc, out + column);
    }
}

template <typename Traits>
void launch_merge(const MergeKernelParams<typename Traits::Slots>& params, void* stream) {
    if (params.num_rows * params.out.heads == 0) return;
    const LaunchConfig config = one_warp_per_row_head(params.num_rows, params.out.heads, stream);
    launch(merge_kernel<Traits>, config, params);
}

template <typename Part>
void merge_csr(const MergeKernelParams<CsrSlots>& params, void* stream) {
    if (is_wide(params.out) && is_wide(params.part_out)) {
        launch_merge<MergeTraits<Part, float, CsrSlots, kWideVector>>(params, stream);
    } else {
        launch_merge<MergeTraits<Part, float, CsrSlots, 1>>(params, stream);
    }
}

template <typename Out>
void merge_strided(const MergeKernelParams<StridedSlots>& params, void* stream) {
    launch_merge<MergeTraits<float, Out, StridedSlots, kWideVector>>(params, stream);
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
