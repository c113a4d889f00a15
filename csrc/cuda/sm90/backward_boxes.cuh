// How consumers of the backward leave accumulators in shared memory for the writer.
#pragma once

#include "cuda/sm90/backward_traits.cuh"

namespace splitkv::sm90 {

inline constexpr int kBoxRegisters = kBoxColumns / 2;  // of a thread, for one box

SPLITKV_DEVICE int warp_of_warpgroup() {
    return static_cast<int>(threadIdx.x % kWarpgroupThreads) / 32;
}
SPLITKV_DEVICE int lane_of_warp() { return static_cast<int>(threadIdx.x) % 32; }

// Tells the other side of a barrier, which counts warps, that this warp's stores are done. They may
// be read by wgmma and bulk copies.
SPLITKV_DEVICE void hand_over(uint32_t barrier) {
    ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

// 32 columns of an accumulator [64 rows, columns], scaled, to a box with the 128-byte swizzle.
SPLITKV_DEVICE void store_box(const float* acc, float factor, uint32_t box) {
    const int lane = lane_of_warp();
    const int row = warp_of_warpgroup() * 16 + lane / 4;
    const int unit = (lane % 4 / 2) ^ (row % 8);  // of 4 columns, 16 bytes
    uint32_t first = box + row * kRowBytes + (unit << 4) + lane % 2 * 8;
    ptx::pin(first);
#pragma unroll
    for (int group = 0; group < kBoxRegisters / 4; ++group) {
        const uint32_t target = first ^ (group * 2 << 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            ptx::st_shared_v2_f32(target + half * 8 * kRowBytes, acc[4 * group + 2 * half] * factor,
                                  acc[4 * group + 2 * half + 1] * factor);
        }
    }
}

}  // namespace splitkv::sm90
