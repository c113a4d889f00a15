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
#include "cuda/sm90/scores_bwd_wide.cuh"

namespace splitkv::sm90 {

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
        while (read_work(smem, at_work, &work)) run_item(work);
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
        const bool is_rounded = uniform(smem.work[at_work.stage].sum_row) == kIsRounded;
        smem.work_barriers.release(at_work);
        at_work.advance();
        stage_pieces(is_rounded);
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
    SPLITKV_DEVICE void stage_pieces(bool is_rounded) {
        smem.dq_barriers[consumer].wait_empty_of(at.before_dq(0));
#pragma unroll
        for (int piece = 0; piece < Traits::kPieces; ++piece) {
            if (piece > 0) wait_piece_empty(piece - 1, at_k.parity);
            const bool is_dv = piece < Traits::kDvPieces;
            const float* acc = is_dv ? dv + piece * kPieceRegisters
                                     : dk + (piece - Traits::kDvPieces) * kPieceRegisters;
            const float factor = is_dv ? 1.0f : params.softmax_scale;
            if (is_rounded) {
                store_rounded<Element, Traits::kPieceColumns>(acc, factor,
                                                              ptx::smem_address(smem.dq[consumer]));
            } else {
                store_piece(acc, factor);
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
