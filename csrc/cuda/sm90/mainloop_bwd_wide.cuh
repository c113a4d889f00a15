// The consumers of the backward for wide head dims, where dk and dv leave no registers for scores.
// One warpgroup computes scores, two hold dk and dv; they meet in shared memory. One step, over one
// row tile of 64 rows and each block of 64 keys:
//
//   score warpgroup   s = q . k^T, dp = dout . v^T               [rows, keys]
//                     p = exp2(scale * s - lse), ds = p * (dp - delta), both stored in 16 bits
//   consumers         dv += p^T . dout, dk += ds^T . q           [keys, columns]
//                     dq = ds . k                                [rows, half of the columns]
//
// (192, 128): the tile has two blocks, each consumer holds dk and dv of one. (256, 256): the tile
// is one block, each consumer holds half of the columns. All operands come from shared memory, p
// and ds either way round: rows of 64 keys are a K-major left operand and, transposed, an MN-major
// one.
//
// No barrier holds the warpgroups together: scores are computed ahead of the gradients by as much
// as the slots of p and ds allow, so the tensor cores have products to do during the exponentials.
#pragma once

#include "cuda/sm90/backward_boxes.cuh"
#include "cuda/sm90/backward_wide_traits.cuh"

namespace splitkv::sm90 {

// Reads what a warp needs of the next item, uniform over the warp; false at the end.
template <typename Smem>
SPLITKV_DEVICE bool take_work(const Smem& smem, RingCursor<kBackwardItemSlots>* at,
                              KvTileWork* work) {
    smem.work_barriers.wait_full(*at);
    const KvTileWork& shared = smem.work[at->stage];
    work->key_begin = uniform(shared.key_begin);
    work->num_steps = uniform(shared.num_steps);
    smem.work_barriers.release(*at);
    at->advance();
    return work->key_begin >= 0;
}

// The place of number `index` in a ring. One count of steps stands for the cursors of all rings:
// registers are scarce.
template <int kNumStages>
SPLITKV_DEVICE RingCursor<kNumStages> place_of(uint32_t index) {
    return {static_cast<int>(index % kNumStages), index / kNumStages % 2};
}

// The places of a step in the rings, the same for all warpgroups; steps are counted over all items.
template <typename Traits>
struct StepPlaces {
    uint32_t step = 0;

    SPLITKV_DEVICE RingCursor<Traits::kStages> q() const { return place_of<Traits::kStages>(step); }
    SPLITKV_DEVICE RingCursor<Traits::kDoutStages> dout() const {
        return place_of<Traits::kDoutStages>(step);
    }
    SPLITKV_DEVICE RingCursor<Traits::kPSlots> p(int block) const {
        return place_of<Traits::kPSlots>(step * Traits::kKeyBlocks + block);
    }
    SPLITKV_DEVICE RingCursor<Traits::kDsSlots> ds(int block) const {
        return place_of<Traits::kDsSlots>(step * Traits::kKeyBlocks + block);
    }
    SPLITKV_DEVICE RingCursor<Traits::kDqSlots> dq(int piece) const {
        const RingCursor<kWriters> writer = place_of<kWriters>(step);
        return {writer.stage * Traits::kDqPieces + piece, writer.parity};
    }
    // The piece before, which had the same buffer. The first step waits for none: nobody has
    // arrived at a barrier of the other parity.
    SPLITKV_DEVICE RingCursor<Traits::kDqSlots> before_dq(int piece) const {
        return piece > 0 ? dq(piece - 1) : StepPlaces{step - 1}.dq(Traits::kDqPieces - 1);
    }
};

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
        while (take_work(smem, &at_work, &work)) run_item(work);
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

// Holds dk and dv of an item, for a block of keys or half of the columns, and computes half of dq.
template <typename Traits>
struct GradientWarpgroup {
    using Smem = BackwardSmem<Traits>;
    using Element = typename Traits::Element;
    static constexpr int kRowSteps = Traits::kRows / kStepK;
    static constexpr int kPieceRegisters = Traits::kPieceColumns / 2;

    const BackwardKernelParams& params;
    Smem& smem;
    const int consumer;  // 0 .. kConsumers - 1
    RingCursor<kBackwardItemSlots> at_work;
    RingCursor<1> at_k;  // its parity is also that of the item's pieces
    StepPlaces<Traits> at;

    float dk[Traits::kDkColumns / 2];
    float dv[Traits::kDvColumns / 2];

    SPLITKV_DEVICE GradientWarpgroup(const BackwardKernelParams& in, Smem& s, int index)
        : params(in), smem(s), consumer(index) {}

    SPLITKV_DEVICE void run() {
        KvTileWork work;
        while (take_work(smem, &at_work, &work)) run_item(work);
    }

  private:
    SPLITKV_DEVICE int block() const { return Traits::kSplitsKeys ? consumer : 0; }

    SPLITKV_DEVICE void run_item(const KvTileWork& work) {
#pragma unroll
        for (int i = 0; i < Traits::kDkColumns / 2; ++i) dk[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < Traits::kDvColumns / 2; ++i) dv[i] = 0.0f;
        smem.k_barriers.wait_full(at_k);
        for (int i = 0; i < work.num_steps; ++i) step();
        smem.k_barriers.release(at_k);
        stage_pieces();
        at_k.advance();
    }

    SPLITKV_DEVICE void step() {
        at.step = uniform(at.step);
        smem.p_barriers.wait_full(at.p(block()));
        smem.dout_barriers.wait_full(at.dout());
        ptx::wgmma_fence();
        issue_dv();
        smem.ds_barriers.wait_full(at.ds(block()));
        smem.q_barriers.wait_full(at.q());
        ptx::wgmma_fence();
        issue_dk();
        ptx::wgmma_wait_group<1>();
        ptx::pin(dv);
        smem.p_barriers.release(at.p(block()));
        smem.dout_barriers.release(at.dout());
#pragma unroll
        for (int other = 0; other < Traits::kKeyBlocks; ++other) {
            smem.ds_barriers.wait_full(at.ds(other));
        }
        compute_dq<0>();
        ++at.step;
    }

    // One piece after the other: there are registers for one.
    template <int kPiece>
    SPLITKV_DEVICE void compute_dq() {
        float dq[kPieceRegisters];
        ptx::wgmma_fence();
        issue_dq(kPiece, dq);
        if constexpr (kPiece == 0) {
            ptx::wgmma_wait_group<1>();
            ptx::pin(dk);
            smem.q_barriers.release(at.q());
        }
        ptx::wgmma_wait_group<0>();
        ptx::pin(dq);
        if constexpr (kPiece + 1 == Traits::kDqPieces) {
#pragma unroll
            for (int i = 0; i < Traits::kKeyBlocks; ++i) {
                smem.ds_barriers.release(at.ds(i));
            }
        }
        smem.dq_barriers[consumer].wait_empty_of(at.before_dq(kPiece));
        wait_piece_empty(Traits::kPieces - 1, at_k.parity ^ 1);
        store_piece(dq, params.softmax_scale);
        hand_over(smem.dq_barriers[consumer].full_address(at.dq(kPiece).stage));
        if constexpr (kPiece + 1 < Traits::kDqPieces) compute_dq<kPiece + 1>();
    }

    SPLITKV_DEVICE void issue_dv() {
        const uint32_t p_low = uniform(mn_major_low(
            ptx::smem_address(smem.p) + at.p(block()).stage * Traits::kBlockBytes, Traits::kRows));
        const uint32_t dout_low = uniform(mn_major_low(ptx::smem_address(smem.dout) +
                                                           at.dout().stage * Traits::kDoutBytes +
                                                           columns(Traits::kDvColumns),
                                                       Traits::kRows));
#pragma unroll
        for (int k = 0; k < kRowSteps; ++k) {
            ptx::wgmma_ss<Element, 1, 1>(dv, descriptor(p_low + mn_major_step(k)),
                                         descriptor(dout_low + mn_major_step(k)), 1);
        }
        ptx::wgmma_commit_group();
    }

    SPLITKV_DEVICE void issue_dk() {
        const uint32_t ds_low = uniform(
            mn_major_low(ptx::smem_address(smem.ds) + at.ds(block()).stage * Traits::kBlockBytes,
                         Traits::kRows));
        const uint32_t q_low =
            uniform(mn_major_low(ptx::smem_address(smem.q) + at.q().stage * Traits::kQBytes +
                                     columns(Traits::kDkColumns),
                                 Traits::kRows));
#pragma unroll
        for (int k = 0; k < kRowSteps; ++k) {
            ptx::wgmma_ss<Element, 1, 1>(dk, descriptor(ds_low + mn_major_step(k)),
                                         descriptor(q_low + mn_major_step(k)), 1);
        }
        ptx::wgmma_commit_group();
    }

    // Where the consumer's columns of a row tile begin, in bytes.
    SPLITKV_DEVICE int columns(int num_columns) const {
        return Traits::kSplitsKeys
                   ? 0
                   : consumer * (num_columns / kChunkColumns) * Traits::kRows * kRowBytes;
    }

    SPLITKV_DEVICE void issue_dq(int piece, float (&dq)[kPieceRegisters]) const {
        const int column = consumer * Traits::kDqColumns + piece * Traits::kPieceColumns;
        const uint32_t k_low = uniform(mn_major_low(
            ptx::smem_address(smem.k) + column / kChunkColumns * Traits::kKeys * kRowBytes +
                column % kChunkColumns * 2,
            Traits::kKeys));
        const uint32_t ds_low =
            uniform(k_major_low(ptx::smem_address(smem.ds) + at.ds(0).stage * Traits::kBlockBytes));
#pragma unroll
        for (int k = 0; k < Traits::kKeys / kStepK; ++k) {
            ptx::wgmma_ss<Element, 0, 1>(dq, descriptor(ds_low + k_major_step(k, Traits::kRows)),
                                         descriptor(k_low + mn_major_step(k)), k > 0);
        }
        ptx::wgmma_commit_group();
    }

    // Leaves dv and dk for the writer, each piece as soon as the one before has been read.
    SPLITKV_DEVICE void stage_pieces() {
        smem.dq_barriers[consumer].wait_empty_of(at.before_dq(0));
#pragma unroll
        for (int piece = 0; piece < Traits::kPieces; ++piece) {
            if (piece > 0) wait_piece_empty(piece - 1, at_k.parity);
            if (piece < Traits::kDvPieces) {
                store_piece(dv + piece * kPieceRegisters, 1.0f);
            } else {
                store_piece(dk + (piece - Traits::kDvPieces) * kPieceRegisters,
                            params.softmax_scale);
            }
            hand_over(smem.piece_barriers[consumer].full_address(piece));
        }
    }

    // Until the writer has read the piece of the item whose parity this is.
    SPLITKV_DEVICE void wait_piece_empty(int piece, uint32_t parity) const {
        ptx::mbarrier_wait(smem.piece_barriers[consumer].empty_address(piece), parity);
    }

    SPLITKV_DEVICE void store_piece(const float* acc, float factor) const {
#pragma unroll
        for (int box = 0; box < Traits::kDqBoxes; ++box) {
            store_box(acc + box * kBoxRegisters, factor,
                      ptx::smem_address(smem.dq[consumer]) + box * kBoxBytes);
        }
    }
};

// What warpgroup `index` of the consumers does: the last computes scores.
template <typename Element, int kDimQk, int kDimV>
SPLITKV_DEVICE void consume_backward(const BackwardKernelParams& params,
                                     BackwardSmem<BackwardWideTraits<Element, kDimQk, kDimV>>& smem,
                                     int index) {
    using Traits = BackwardWideTraits<Element, kDimQk, kDimV>;
    if (index == Traits::kConsumers) {
        ptx::setmaxnreg_dec<Traits::kScoreRegisters>();
        ScoreWarpgroup<Traits>(params, smem).run();
    } else {
        ptx::setmaxnreg_inc<Traits::kConsumerRegisters>();
        GradientWarpgroup<Traits>(params, smem, index).run();
    }
}

}  // namespace splitkv::sm90
