// Forward of partial attention: out and lse of each query row over its own interval of the keys.
//
// A persistent grid of one CTA per SM. Warpgroup 0 is the producer: one thread takes items, dearest
// first, and loads q once and k, v tile by tile with TMA. The other warpgroups consume them
// (mainloop_fwd.cuh) and write the result, or a fp32 partial where the keys of a row tile were
// split over several items. The rows of a tile are query rows of one head, or rows times the query
// heads of one KV head: row m of a tile is query row m / heads_per_tile, head m % heads_per_tile.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/sm90/forward_producer.cuh"
#include "cuda/sm90/mainloop_fwd.cuh"
#include "cuda/sm90/partial_fwd.h"
#include "cuda/tensor_map.h"

namespace splitkv::sm90 {

// Where the two rows of a thread come from and go to.
struct ThreadRows {
    int32_t row[kRowsPerThread];  // query row, counted from the item's first
    int32_t head[kRowsPerThread];
    bool is_valid[kRowsPerThread];
};

SPLITKV_DEVICE ThreadRows thread_rows(const TileWork& work, int heads_per_tile, int first_row) {
    ThreadRows at;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
        const int m = first_row + 8 * i;
        at.row[i] = m / heads_per_tile;
        at.head[i] = work.first_head + m % heads_per_tile;
        at.is_valid[i] = at.row[i] < work.num_rows;
    }
    return at;
}

SPLITKV_DEVICE RowIntervals load_intervals(const ForwardKernelParams& params, const TileWork& work,
                                           const ThreadRows& at) {
    RowIntervals rows;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
        rows.begin[i] = 0;
        rows.length[i] = 0;
        if (!at.is_valid[i]) continue;
        const int32_t begin = __ldg(params.kv_begin + work.row_begin + at.row[i]);
        const int32_t end = __ldg(params.kv_end + work.row_begin + at.row[i]);
        rows.begin[i] = begin;
        rows.length[i] = begin < end ? static_cast<uint32_t>(end - begin) : 0u;
    }
    return rows;
}

// Registers of row kRow of a thread, scaled and rounded, to memory. kRow is a template parameter:
// as a loop variable it stays one at head_dim 256, and then indexes o in local memory.
template <int kRow, typename Element, int kRegisters>
SPLITKV_DEVICE void store_values(const float (&o)[kRegisters], float factor, bool is_empty,
                                 Element* target) {
    target += 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < kRegisters / 4; ++j) {
        // Not o * 0: where no key was seen, o holds whatever hidden keys held.
        const float low = is_empty ? 0.0f : o[4 * j + 2 * kRow] * factor;
        const float high = is_empty ? 0.0f : o[4 * j + 2 * kRow + 1] * factor;
        if constexpr (std::is_same_v<Element, float>) {
            *reinterpret_cast<float2*>(target + 8 * j) = {low, high};
        } else {
            *reinterpret_cast<uint32_t*>(target + 8 * j) = ptx::cvt_rn_x2<Element>(low, high);
        }
    }
}

template <int kRow, typename Traits>
SPLITKV_DEVICE void store_row(const ForwardKernelParams& params, const TileWork& work,
                              const ThreadRows& at, const ForwardConsumer<Traits>& consumer) {
    constexpr float kLn2 = 0.693147180559945309f;
    const float sum = quad_sum(consumer.state.sum[kRow]);
    const float max = consumer.state.max[kRow];
    // The largest score adds 1 to the sum. Not max == -INFINITY, which also holds for NaN alone.
    const bool is_empty = consumer.rows.is_empty(kRow) || sum == 0.0f;
    if (!at.is_valid[kRow]) return;
    const bool is_part = work.part_row >= 0;
    const Rows& out = is_part ? params.part_out : params.out;
    const Rows& lse = is_part ? params.part_lse : params.lse;
    const int64_t row = (is_part ? work.part_row : work.row_begin) + at.row[kRow];
    const int64_t head = at.head[kRow];
    const int64_t offset = row * out.row_stride + head * out.head_stride;
    const float factor = __fdividef(1.0f, sum);
    if (out.dtype == DType::kFloat32) {
        store_values<kRow>(consumer.o, factor, is_empty, static_cast<float*>(out.data) + offset);
    } else if (out.dtype == DType::kBFloat16) {
        store_values<kRow>(consumer.o, factor, is_empty,
                           static_cast<__nv_bfloat16*>(out.data) + offset);
    } else {
        store_values<kRow>(consumer.o, factor, is_empty, static_cast<__half*>(out.data) + offset);
    }
    if (threadIdx.x % 4 == 0) {
        const float value = fmaf(max, params.scale_log2, log2f(sum)) * kLn2;
        static_cast<float*>(lse.data)[row * lse.row_stride + head * lse.head_stride] =
            is_empty ? -INFINITY : value;
    }
}

template <typename Traits>
SPLITKV_DEVICE void consume(const ForwardKernelParams& params, ForwardSmem<Traits>& smem,
                            int index) {
    ForwardConsumer<Traits> consumer(params, smem, index);
    const int warp = static_cast<int>(threadIdx.x % kWarpgroupThreads) / 32;
    const int first_row =
        index * kWarpgroupRows + warp * 16 + static_cast<int>(threadIdx.x % 32) / 4;
    TileWork work;
    while (consumer.next_work(&work)) {
        const ThreadRows at = thread_rows(work, params.heads_per_tile, first_row);
        consumer.rows = load_intervals(params, work, at);
        consumer.attend(work);
        store_row<0>(params, work, at, consumer);
        store_row<1>(params, work, at, consumer);
    }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardKernelParams params) {
    extern __shared__ uint8_t raw_smem[];
    const uint32_t misalignment = ptx::smem_address(raw_smem) % kSwizzleBytes;
    auto& smem = *reinterpret_cast<ForwardSmem<Traits>*>(
        raw_smem + (misalignment == 0 ? 0 : kSwizzleBytes - misalignment));
    const int warpgroup = uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads);
    if (threadIdx.x == 0) {
        constexpr int kWarpsPerWarpgroup = kWarpgroupThreads / 32;
        smem.work_barriers.init(Traits::kConsumers * kWarpsPerWarpgroup);
        smem.q_barriers.init(Traits::kConsumers);
        smem.k_barriers.init(Traits::kConsumers);
        smem.v_barriers.init(Traits::kConsumers);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    // The whole grid is resident: a merge that follows may take each SM as it becomes free.
    cudaTriggerProgrammaticLaunchCompletion();
    if (warpgroup == 0) {
        if constexpr (Traits::kConsumers > 1) {
            ptx::setmaxnreg_dec<Traits::kProducerRegisters>();
        }
        if (threadIdx.x == 0) ForwardProducer<Traits>(params, smem).run();
    } else {
        if constexpr (Traits::kConsumers > 1) {
            ptx::setmaxnreg_inc<Traits::kConsumerRegisters>();
        }
        consume<Traits>(params, smem, warpgroup - 1);
    }
}

template <typename Traits>
void launch_forward_kernel(const ForwardParams& params, const cuda::ForwardItem* items,
                           const cuda::ForwardWorkShape& shape, const ForwardWorkspace& workspace) {
    constexpr double kLog2E = 1.44269504088896340736;
    const auto heads_per_tile = static_cast<int32_t>(shape.heads_per_tile);
    ForwardKernelParams kernel_params{};
    kernel_params.q =
        cuda::make_tensor_map("q", params.q, {Traits::kRows / heads_per_tile, heads_per_tile});
    kernel_params.k = cuda::make_tensor_map("k", params.k, {Traits::kKeys, 1});
    kernel_params.v = cuda::make_tensor_map("v", params.v, {Traits::kKeys, 1});
    kernel_params.items = items;
    kernel_params.kv_begin = params.kv_begin;
    kernel_params.kv_end = params.kv_end;
    kernel_params.out = params.out;
    kernel_params.lse = params.lse;
    kernel_params.part_out = workspace.part_out;
    kernel_params.part_lse = workspace.part_lse;
    kernel_params.counter = workspace.counter;
    kernel_params.num_items = static_cast<int32_t>(shape.num_items);
    kernel_params.num_tile_heads = static_cast<int32_t>(params.q.heads / shape.heads_per_tile);
    kernel_params.heads_per_tile = heads_per_tile;
    kernel_params.group = static_cast<int32_t>(params.q.heads / params.k.heads);
    kernel_params.is_head_major = static_cast<int32_t>(shape.is_head_major);
    kernel_params.scale_log2 = static_cast<float>(params.softmax_scale * kLog2E);

    const int64_t num_work = shape.num_items * kernel_params.num_tile_heads;
    cuda::LaunchConfig config{};
    config.grid = dim3(static_cast<unsigned>(
        std::min<int64_t>(num_work, cuda::num_sms(params.launch.device_index))));
    config.block = dim3(Traits::kThreads);
    config.cluster = cuda::no_cluster();
    config.smem_bytes = forward_smem_bytes<Traits>();
    config.stream = static_cast<cudaStream_t>(params.launch.stream);
    if (num_work > config.grid.x) {
        SPLITKV_CUDA_CHECK(cudaMemsetAsync(workspace.counter, 0, sizeof(int32_t), config.stream));
    }
    cuda::launch(forward_kernel<Traits>, config, kernel_params);
}

}  // namespace splitkv::sm90
