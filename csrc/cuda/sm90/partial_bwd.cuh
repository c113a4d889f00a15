// Backward of partial attention: adds to dk and dv of each key and to dq of each query row.
//
// A persistent grid of one CTA per SM. Warpgroup 0 holds two threads: the loader takes items,
// dearest first, and loads k and v once and q, dout tile by tile with TMA; the writer adds dq to
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
#include "cuda/sm90/partial_bwd.h"
#include "cuda/tensor_map.h"

namespace splitkv::sm90 {

// Adds the registers of an accumulator [64 keys, columns] to the rows of a gradient. Lanes in pairs
// swap halves, so that each adds 4 columns of one key: of the thread's first key where its lane is
// even, else of the second.
template <int kRegisters>
SPLITKV_DEVICE void add_to_rows(const float (&acc)[kRegisters], float factor, int first_key,
                                int kv_head, const Rows& gradient) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const bool is_odd = lane % 2 != 0;
    const int64_t key = first_key + (is_odd ? 8 : 0);
    const bool is_valid = key < gradient.rows;
    float* target = static_cast<float*>(gradient.data) + key * gradient.row_stride +
                    kv_head * gradient.head_stride + lane % 4 / 2 * 4;
#pragma unroll
    for (int group = 0; group < kRegisters / 4; ++group) {
        const float a = acc[4 * group] * factor;
        const float b = acc[4 * group + 1] * factor;
        const float c = acc[4 * group + 2] * factor;
        const float d = acc[4 * group + 3] * factor;
        const float first = __shfl_xor_sync(0xffffffffu, is_odd ? a : c, 1);
        const float second = __shfl_xor_sync(0xffffffffu, is_odd ? b : d, 1);
        if (!is_valid) continue;
        if (is_odd) {
            ptx::red_add_v4_f32(target + 8 * group, first, second, c, d);
        } else {
            ptx::red_add_v4_f32(target + 8 * group, a, b, first, second);
        }
    }
}

template <typename Traits>
SPLITKV_DEVICE void consume_backward(const BackwardKernelParams& params, BackwardSmem<Traits>& smem,
                                     int index) {
    BackwardConsumer<Traits> consumer(params, smem, index);
    KvTileWork work;
    while (consumer.next_work(&work)) {
        consumer.accumulate(work);
        const bool takes_turns = work.turn_index >= 0;
        if (takes_turns) wait_for_turn(params.part_turns + work.turn_index, work.part);
        add_to_rows(consumer.dv, 1.0f, consumer.first_key, work.kv_head, params.dv);
        add_to_rows(consumer.dk, params.softmax_scale, consumer.first_key, work.kv_head, params.dk);
        if (takes_turns) {
            __threadfence();
            ptx::barrier_sync(BackwardConsumer<Traits>::kDsBarrier,
                              BackwardConsumer<Traits>::kConsumerThreads);
            if (index == 0 && consumer.is_leader()) {
                ptx::red_release_gpu_add(params.part_turns + work.turn_index, 1);
            }
        }
    }
    consumer.finish();
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardKernelParams params) {
    extern __shared__ uint8_t raw_smem[];
    const uint32_t misalignment = ptx::smem_address(raw_smem) % kSwizzleBytes;
    auto& smem = *reinterpret_cast<BackwardSmem<Traits>*>(
        raw_smem + (misalignment == 0 ? 0 : kSwizzleBytes - misalignment));
    const int warpgroup = uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads);
    constexpr int kWarpsPerWarpgroup = kWarpgroupThreads / 32;
    if (threadIdx.x == 0) {
        smem.work_barriers.init(Traits::kConsumers * kWarpsPerWarpgroup);
        smem.k_barriers.init(Traits::kConsumers);
        smem.v_barriers.init(Traits::kConsumers);
        smem.q_barriers.init(Traits::kConsumers);
        smem.dout_barriers.init(Traits::kConsumers);
        for (int i = 0; i < Traits::kConsumers; ++i) {
            ptx::mbarrier_init(smem.dq_barriers[i].full_address(0), kWarpsPerWarpgroup);
            ptx::mbarrier_init(smem.dq_barriers[i].empty_address(0), 1);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (warpgroup == 0) {
        ptx::setmaxnreg_dec<Traits::kProducerRegisters>();
        if (threadIdx.x == 0) {
            BackwardLoader<Traits>(params, smem).run();
        } else if (threadIdx.x == 32) {
            DqWriter<Traits>(params, smem).run();
        }
    } else {
        ptx::setmaxnreg_inc<Traits::kConsumerRegisters>();
        consume_backward<Traits>(params, smem, warpgroup - 1);
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
    kernel_params.items = work.items;
    kernel_params.row_tiles = work.row_tiles;
    kernel_params.segments = work.segments;
    kernel_params.statistics = workspace.statistics;
    kernel_params.limits = workspace.limits;
    kernel_params.dk = params.dk;
    kernel_params.dv = params.dv;
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
