// The score warpgroup of the backward for wide head dims (mainloop_bwd_wide.cuh).
#pragma once

#include "cuda/sm90/backward_boxes.cuh"
#include "cuda/sm90/backward_wide_traits.cuh"

namespace splitkv::sm90 {

// Computes p and ds of all blocks of a step.
template <typename Traits>
struct ScoreWarpgroup {
    using Smem = BackwardSmem<Traits>;
    using Element = typename Traits::Element;
    static constexpr int kRegisters = kChunkColumns / 2;  // of a block
    static constexpr int kSteps = kChunkColumns / kStepK;

    const BackwardKernelParams& params;
    Smem& smem;
    RingCursor<kBackwardItemSlots> at_work;
    RingCursor<1> at_kv;
    StepPlaces<Traits> at;
    int32_t first_key;  // of this thread, in the tensor

    SPLITKV_DEVICE ScoreWarpgroup(const BackwardKernelParams& in, Smem& s) : params(in), smem(s) {}

    SPLITKV_DEVICE void run() {
        KvTileWork work;
        while (read_work(smem, at_work, &work)) {
            smem.work_barriers.release(at_work);
            at_work.advance();
            run_item(work);
        }
    }

  private:
    SPLITKV_DEVICE void run_item(const KvTileWork& work) {
        first_key = work.key_begin + 2 * (lane_of_warp() % 4);
        smem.k_barriers.wait_full(at_kv);
        smem.v_barriers.wait_full(at_kv);
        for (int i = 0; i < work.num_steps; ++i) {
            smem.q_barriers.wait_full(at.q());
            if (uniform(smem.is_masked[at.q().stage]) != 0) {
                step<true>();
            } else {
                step<false>();
            }
        }
        smem.k_barriers.release(at_kv);
        smem.v_barriers.release(at_kv);
        at_kv.advance();
    }

    // The first of a thread's two rows; the other is 8 further on.
    static SPLITKV_DEVICE int first_row() { return warp_of_warpgroup() * 16 + lane_of_warp() / 4; }

    template <bool kIsMasked>
    SPLITKV_DEVICE void step() {
        at.step = uniform(at.step);
        const float* statistics = smem.statistics[at.q().stage][0] + first_row();
        const float lse[2] = {statistics[0], statistics[8]};
        const float delta[2] = {statistics[Traits::kRows], statistics[Traits::kRows + 8]};
#pragma unroll
        for (int block = 0; block < Traits::kKeyBlocks; ++block) {
            compute_block<kIsMasked>(block, lse, delta);
        }
        smem.q_barriers.release(at.q());
        smem.dout_barriers.release(at.dout());
        ++at.step;
    }

    template <bool kIsMasked>
    SPLITKV_DEVICE void compute_block(int block, const float (&lse)[2], const float (&delta)[2]) {
        float s[kRegisters];
        ptx::wgmma_fence();
        issue_s(block, s);
        ptx::wgmma_wait_group<0>();
        ptx::pin(s);
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) {
            s[i] = ptx::ex2_approx(fmaf(s[i], params.scale_log2, -lse[row_index(i)]));
        }
        if constexpr (kIsMasked) mask(block, s);
        const uint32_t p_target = block_target(smem.p, at.p(block).stage);
        smem.p_barriers.wait_empty(at.p(block));
        store_block(s, p_target);
        hand_over(smem.p_barriers.full_address(at.p(block).stage));
        float dp[kRegisters];
        smem.dout_barriers.wait_full(at.dout());
        ptx::wgmma_fence();
        issue_dp(block, dp);
        ptx::wgmma_wait_group<0>();
        ptx::pin(dp);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            float p[8];
            if constexpr (Traits::kKeepsP) {
#pragma unroll
                for (int i = 0; i < 8; ++i) p[i] = s[8 * k + i];
            } else {
                load_step(p_target, k, p);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float& value = dp[8 * k + i];
                value = p[i] * (value - delta[row_index(i)]);
            }
        }
        smem.ds_barriers.wait_empty(at.ds(block));
        store_block(dp, block_target(smem.ds, at.ds(block).stage));
        hand_over(smem.ds_barriers.full_address(at.ds(block).stage));
    }

    // Which of the thread's two rows register i of an accumulator belongs to.
    static SPLITKV_DEVICE constexpr int row_index(int i) { return i / 2 % 2; }

    SPLITKV_DEVICE void mask(int block, float (&s)[kRegisters]) const {
        const auto* limits = reinterpret_cast<const int2*>(smem.limits[at.q().stage]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // First key and number of keys of the row.
            const int2 seen = limits[first_row() + 8 * half];
            const int32_t first = first_key + block * kChunkColumns - seen.x;
#pragma unroll
            for (int i = 2 * half; i < kRegisters; i += 4) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int32_t place = first + 2 * i - 4 * half + j;
                    if (static_cast<uint32_t>(place) >= static_cast<uint32_t>(seen.y)) {
                        s[i + j] = 0.0f;
                    }
                }
            }
        }
    }

    SPLITKV_DEVICE void issue_s(int block, float (&s)[kRegisters]) const {
        const uint32_t q_low =
            uniform(k_major_low(ptx::smem_address(smem.q) + at.q().stage * Traits::kQBytes));
        const uint32_t k_low =
            uniform(k_major_low(ptx::smem_address(smem.k) + block * kChunkColumns * kRowBytes));
#pragma unroll
        for (int k = 0; k < Traits::kHeadDimQk / kStepK; ++k) {
            ptx::wgmma_ss<Element, 0, 0>(s, descriptor(q_low + k_major_step(k, Traits::kRows)),
                                         descriptor(k_low + k_major_step(k, Traits::kKeys)), k > 0);
        }
        ptx::wgmma_commit_group();
    }

    SPLITKV_DEVICE void issue_dp(int block, float (&dp)[kRegisters]) const {
        const uint32_t dout_low = uniform(
            k_major_low(ptx::smem_address(smem.dout) + at.dout().stage * Traits::kDoutBytes));
        const uint32_t v_low =
            uniform(k_major_low(ptx::smem_address(smem.v) + block * kChunkColumns * kRowBytes));
#pragma unroll
        for (int k = 0; k < Traits::kHeadDimV / kStepK; ++k) {
            ptx::wgmma_ss<Element, 0, 0>(dp, descriptor(dout_low + k_major_step(k, Traits::kRows)),
                                         descriptor(v_low + k_major_step(k, Traits::kKeys)), k > 0);
        }
        ptx::wgmma_commit_group();
    }

    // Where this lane's row of the first of four 8x8 matrices lies in a slot, that of a step of 16
    // keys: of [rows, 64 keys] with the 128-byte swizzle.
    template <int kSlots>
    static SPLITKV_DEVICE uint32_t block_target(const uint8_t (&slots)[kSlots][Traits::kBlockBytes],
                                                int slot) {
        const int lane = lane_of_warp();
        const int row = warp_of_warpgroup() * 16 + lane / 8 % 2 * 8 + lane % 8;
        const int unit = lane / 16 ^ lane % 8;  // of 8 keys, 16 bytes
        return ptx::smem_address(slots) + slot * Traits::kBlockBytes + row * kRowBytes + unit * 16;
    }

    // An accumulator to a slot, in 16 bits.
    static SPLITKV_DEVICE void store_block(const float (&acc)[kRegisters], uint32_t target) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            uint32_t packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                packed[i] = ptx::cvt_rn_x2<Element>(acc[8 * k + 2 * i], acc[8 * k + 2 * i + 1]);
            }
            ptx::stmatrix_x4(target ^ (k * kStepK * 2), packed);
        }
    }

    // What store_block has stored of a step of 16 keys. Its lanes have met since, in wgmma.
    static SPLITKV_DEVICE void load_step(uint32_t target, int k, float (&values)[8]) {
        uint32_t packed[4];
        ptx::ldmatrix_x4(target ^ (k * kStepK * 2), packed);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = ptx::cvt_f32_x2<Element>(packed[i]);
            values[2 * i] = pair.x;
            values[2 * i + 1] = pair.y;
        }
    }
};

}  // namespace splitkv::sm90
