// Backward of partial attention: adds to dk and dv of each key and to dq of each query row.
//
// A persistent grid of one CTA per SM. Warpgroup 0 holds three threads: a loader takes items,
// dearest first, and loads k and v once and q, dout tile by tile with TMA; two writers add dq to
// global memory with TMA. The other warpgroups consume the tiles (mainloop_bwd.cuh). An item is a
// KV tile of one KV head with all row tiles that see it, for all query heads of the group, so dk
// and dv need no atomics: each CTA adds its registers once, or the parts of a split tile do so in
// turn.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/sm90/backward_producer.cuh"
#include "cuda/sm90/mainloop_bwd.cuh"
#include "cuda/sm90/mainloop_bwd_wide.cuh"
#include "cuda/sm90/partial_bwd.h"
#include "cuda/tensor_map.h"

namespace splitkv::sm90 {

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardKernelParams params) {
    // No room to spare for aligning by hand; what starts at no multiple of 1024 would be garbage.
    extern __shared__ __align__(kSwizzleBytes) uint8_t aligned_smem[];
    if (ptx::smem_address(aligned_smem) % kSwizzleBytes != 0) __trap();
    auto& smem = *reinterpret_cast<BackwardSmem<Traits>*>(aligned_smem);
    const int warpgroup = uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads);
    if (threadIdx.x == 0) {
        smem.init_barriers();
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (warpgroup == 0) {
        ptx::setmaxnreg_dec<Traits::kProducerRegisters>();
        if (threadIdx.x == 0) {
            BackwardLoader<Traits>(params, smem).run();
        } else if (threadIdx.x == 32) {
            BackwardWriter<Traits>(params, smem, 0).run();
        } else if (threadIdx.x == 64) {
            BackwardWriter<Traits>(params, smem, 1).run();
        }
    } else {
        consume_backward(params, smem, warpgroup - 1);
    }
}

template <typename Traits>
BackwardKernelParams make_kernel_params(const BackwardParams& params,
                                        const BackwardWorkArrays& work,
                                        const cuda::BackwardWorkShape& shape,
                                        const BackwardWorkspace& workspace) {
    constexpr double kLog2E = 1.44269504088896340736;
    const auto heads = static_cast<int32_t>(shape.heads_per_tile);
    const cuda::TensorMapBox rows{Traits::kRows / heads, heads};
    const cuda::TensorMapBox keys{Traits::kKeys, 1};
    BackwardKernelParams kernel_params{};
    kernel_params.q = cuda::make_tensor_map("q", params.q, rows);
    kernel_params.dout = cuda::make_tensor_map("dout", params.dout, rows);
    kernel_params.k = cuda::make_tensor_map("k", params.k, keys);
    kernel_params.v = cuda::make_tensor_map("v", params.v, keys);
    kernel_params.dq = cuda::make_tensor_map("dq", params.dq, {kWarpgroupRows / heads, heads});
    kernel_params.dk = cuda::make_tensor_map("dk", workspace.dk_sums, {kWarpgroupRows, 1});
    kernel_params.dv = cuda::make_tensor_map("dv", workspace.dv_sums, {kWarpgroupRows, 1});
    kernel_params.rounds = static_cast<int32_t>(params.dk.dtype != DType::kFloat32);
    if (kernel_params.rounds != 0) {
        const cuda::TensorMapBox piece{kWarpgroupRows, 1, 2 * Traits::kPieceColumns};
        kernel_params.rounded_dk = cuda::make_tensor_map("dk", params.dk, piece);
        kernel_params.rounded_dv = cuda::make_tensor_map("dv", params.dv, piece);
    }
    kernel_params.items = work.items;
    kernel_params.row_tiles = work.row_tiles;
    kernel_params.segments = work.segments;
    kernel_params.statistics = workspace.statistics;
    kernel_params.limits = workspace.limits;
    kernel_params.counter = workspace.counter;
    kernel_params.part_turns = workspace.part_turns;
    kernel_params.dq_turns = workspace.dq_turns;
    kernel_params.num_items = static_cast<int32_t>(shape.num_items);
    kernel_params.num_row_tiles = static_cast<int32_t>(shape.num_row_tiles);
    kernel_params.num_splits = static_cast<int32_t>(shape.num_splits);
    kernel_params.num_heads_kv = static_cast<int32_t>(params.k.heads);
    kernel_params.heads_per_tile = heads;
    kernel_params.tile_heads_per_kv_head =
        static_cast<int32_t>(params.q.heads / params.k.heads / shape.heads_per_tile);
    kernel_params.is_head_major = static_cast<int32_t>(shape.is_head_major);
    kernel_params.prefetches_dq = static_cast<int32_t>(shape.prefetches_dq);
    kernel_params.accumulates = static_cast<int32_t>(params.accumulates);
    kernel_params.softmax_scale = params.softmax_scale;
    kernel_params.scale_log2 = static_cast<float>(params.softmax_scale * kLog2E);
    return kernel_params;
}

template <typename Traits>
void launch_backward_kernel(const BackwardParams& params, const BackwardWorkArrays& work,
                            const cuda::BackwardWorkShape& shape,
                            const BackwardWorkspace& workspace) {
    const int64_t num_work = shape.num_items * params.k.heads;
    cuda::LaunchConfig config{};
    config.grid = dim3(static_cast<unsigned>(
        std::min<int64_t>(num_work, cuda::num_sms(params.launch.device_index))));
    config.block = dim3(Traits::kThreads);
    config.cluster = cuda::no_cluster();
    config.smem_bytes = backward_smem_bytes<Traits>();
    config.stream = static_cast<cudaStream_t>(params.launch.stream);
    cuda::launch(backward_kernel<Traits>, config,
                 make_kernel_params<Traits>(params, work, shape, workspace));
}

}  // namespace splitkv::sm90
