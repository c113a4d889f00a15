// How consumers of the backward leave accumulators in shared memory for the writer.
#pragma once

#include "cuda/sm90/backward_traits.cuh"

namespace splitkv::sm90 {

inline constexpr int kBoxRegisters = kBoxColumns / 2;  // of a thread, for one box

SPLITKV_DEVICE int warp_of_warpgroup() {
    return static_cast<int>(threadIdx.x % kWarpgroupThreads) / 32;
}
SPLITKV_DEVICE int lane_of_warp() { return ptx::laneid(); }

// Tells the other side of a barrier that this thread's stores are done. They may be read by wgmma
// and bulk copies.
SPLITKV_DEVICE void hand_over(uint32_t barrier) {
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(barrier);
}

// 32 columns of an accumulator [64 rows, columns], scaled, to a box with the 128-byte swizzle.
// Odd rows store the column groups in another order than even ones: so the 16 lanes of a
// wavefront, of 4 rows, hit all banks once. In the same order they would hit half of them twice.
SPLITKV_DEVICE void store_box(const float* acc, float factor, uint32_t box) {
    constexpr int kGroups = kBoxRegisters / 4;  // of 8 columns, 2 of them in a thread
    constexpr int kFlip = kGroups / 2;
    const int lane = lane_of_warp();
    const int row = warp_of_warpgroup() * 16 + lane / 4;
    const bool is_odd = row % 2 != 0;
    const int unit = (lane % 4 / 2) ^ (is_odd ? 2 * kFlip : 0);  // of 4 columns, 16 bytes
    const uint32_t target = box + row * kRowBytes + ((unit ^ (row % 8)) << 4) + lane % 2 * 8;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* even = acc + 4 * group + 2 * half;
            const float* odd = acc + 4 * (group ^ kFlip) + 2 * half;
            // Boxes start at multiples of 1024, so that flipping bits moves inside the row.
            ptx::st_shared_v2_f32((target ^ (group << 5)) + half * 8 * kRowBytes,
                                  (is_odd ? odd[0] : even[0]) * factor,
                                  (is_odd ? odd[1] : even[1]) * factor);
        }
    }
}

// Columns of an accumulator [64 rows, columns], scaled and rounded, as a box whose rows are
// swizzled over their own length of 128 or 64 bytes.
template <typename Element, int kColumns>
SPLITKV_DEVICE void store_rounded(const float* acc, float factor, uint32_t box) {
    constexpr int kBytes = 2 * kColumns;  // of a row
    static_assert(kBytes == kRowBytes || 2 * kBytes == kRowBytes,
                  "other swizzles have other rules");
    // Of the four 8x8 matrices of a store, this lane gives the address of one row of one.
    const int lane = lane_of_warp();
    const int row = warp_of_warpgroup() * 16 + lane % 16;
    const int unit = lane / 16;  // of 8 columns, 16 bytes
    // Units of 16 bytes trade places by the number of the 128 bytes that they lie in.
    const int flip = row * kBytes / kRowBytes % (kBytes / 16);
    const uint32_t target = box + row * kBytes + ((unit ^ flip) << 4);
#pragma unroll
    for (int group = 0; group < kColumns / 16; ++group) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* pair = acc + 8 * group + 2 * i;
            packed[i] = ptx::cvt_rn_x2<Element>(pair[0] * factor, pair[1] * factor);
        }
        ptx::stmatrix_x4(target ^ (group << 5), packed);
    }
}

}  // namespace splitkv::sm90
