// The consumers of the backward: each warpgroup owns 64 keys of the KV tile and keeps their dk and
// dv in registers. One step, over one row tile:
//
//   s  = k . q^T, dp = v . dout^T                     [keys, rows], so that
//   p  = exp2(scale * s - lse), ds = p * (dp - delta)  are already the left operands of
//   dv += p . dout, dk += ds . q                       taken from registers
//   dq  = ds^T . k                                     ds of all consumers through shared memory
//
// dq is a step behind: the ds that it takes has long been there, and no consumer waits for another.
// dv is issued before ds is handed over, and the proxy fence hides under the product. dq, and in
// the end dk and dv, go to global memory through the BackwardWriter, by way of shared memory.
#pragma once

#include "cuda/sm90/backward_boxes.cuh"
#include "cuda/sm90/backward_traits.cuh"

namespace splitkv::sm90 {

template <typename Traits>
struct BackwardConsumer {
    using Smem = BackwardSmem<Traits>;
    using Element = typename Traits::Element;
    static constexpr int kScoreRegisters = Traits::kRows / 2;
    static constexpr int kColumnGroups = Traits::kRows / 8;  // of 8 rows, 2 of them in a thread
    static constexpr int kRowSteps = Traits::kRows / kStepK;
    static constexpr int kDqRegisters = Traits::kDqColumns / 2;
    static constexpr bool kHasRegisters = Traits::kRows == 64;  // to load lse early
    static constexpr int kDsBarrier = 1;  // named barrier at the end of an item; 0 is __syncthreads
    static constexpr int kConsumerThreads = Traits::kConsumers * kWarpgroupThreads;

    const BackwardKernelParams& params;
    Smem& smem;
    const int consumer;  // 0 .. kConsumers - 1
    RingCursor<kBackwardItemSlots> at_work;
    RingCursor<Traits::kStages> at_step;  // of q, dout, ds and, one step later, dq
    RingCursor<Traits::kKeyStages> at_k;  // also of v and, in pieces, of dv and dk
    uint32_t k_low;                       // of the consumer's keys, left operand of s
    uint32_t v_low;                       // of the consumer's keys, left operand of dp
    uint32_t k_dq_low;                    // of all keys, right operand of dq
    int32_t first_key;  // of this thread, in the tensor; its other key is 8 further on

    float dk[Traits::kHeadDimQk / 2];
    float dv[Traits::kHeadDimV / 2];

    SPLITKV_DEVICE BackwardConsumer(const BackwardKernelParams& in, Smem& s, int index)
        : params(in), smem(s), consumer(index) {
        v_low = uniform(k_major_low(ptx::smem_address(smem.v) + key_bytes()));
        find_k();
    }

    static SPLITKV_DEVICE int warp() { return warp_of_warpgroup(); }
    static SPLITKV_DEVICE int lane() { return lane_of_warp(); }

    // Adds the shares of all items of this CTA to dk and dv.
    SPLITKV_DEVICE void run() {
        KvTileWork work;
        while (read_work(smem, at_work, &work)) run_item(work);
    }

  private:
    SPLITKV_DEVICE void run_item(const KvTileWork& work) {
        first_key = work.key_begin + consumer * kWarpgroupRows + warp() * 16 + lane() / 4;
#pragma unroll
        for (int i = 0; i < Traits::kHeadDimQk / 2; ++i) dk[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < Traits::kHeadDimV / 2; ++i) dv[i] = 0.0f;
        if constexpr (Traits::kKeyStages > 1) find_k();
        smem.k_barriers.wait_full(at_k);
        next_step<true>(work.num_steps == 1);
        for (int i = 2; i <= work.num_steps; ++i) next_step<false>(i == work.num_steps);
        last_dq();
        const bool is_rounded = uniform(smem.work[at_work.stage].sum_row) == kIsRounded;
        smem.work_barriers.release(at_work);
        at_work.advance();
        stage_pieces<0>(is_rounded);
        at_k.advance();
    }

    // Of the consumer's keys in a tile of k or v.
    SPLITKV_DEVICE int key_bytes() const { return consumer * kWarpgroupRows * kRowBytes; }

    SPLITKV_DEVICE void find_k() {
        const uint32_t k = ptx::smem_address(smem.k) + at_k.stage * Traits::kKBytes;
        k_low = uniform(k_major_low(k + key_bytes()));
        const int column_chunk =
            Traits::kSplitsDqRows ? 0 : consumer * (Traits::kDqColumns / kChunkColumns);
        k_dq_low =
            uniform(mn_major_low(k + column_chunk * Traits::kKeys * kRowBytes, Traits::kKeys));
    }

    // Two neighbouring rows of the thread in column group `group`, of an array over the tile's
    // rows.
    SPLITKV_DEVICE int row_of_group(int group) const { return 8 * group + 2 * (lane() % 4); }

    template <bool kIsFirst>
    SPLITKV_DEVICE void next_step(bool is_last) {
        smem.q_barriers.wait_full(at_step);
        if (uniform(smem.is_masked[at_step.stage]) != 0) {
            step<true, kIsFirst>(is_last);
        } else {
            step<false, kIsFirst>(is_last);
        }
    }

    template <bool kIsMasked, bool kIsFirst>
    SPLITKV_DEVICE void step(bool is_last) {
        float lse[2 * kColumnGroups];
        if constexpr (kHasRegisters) load_pairs(smem.statistics[at_step.stage][0], lse);
        float s[kScoreRegisters];
        float dp[kScoreRegisters];
        ptx::wgmma_fence();
        issue_s(s);
        smem.dout_barriers.wait_full(at_step);
        if constexpr (kIsFirst) smem.v_barriers.wait_full(place_of_item(at_k));
        ptx::wgmma_fence();
        issue_dp(dp);
        ptx::wgmma_wait_group<1>();
        ptx::pin(s);
        if constexpr (!kHasRegisters) load_pairs(smem.statistics[at_step.stage][0], lse);
        exponentiate(lse, s);
        if constexpr (kIsMasked) mask(s);
        uint32_t p[kRowSteps][4];
        pack(s, p);
        ptx::wgmma_wait_group<0>();
        ptx::pin(dp);
        if (is_last) smem.v_barriers.release(place_of_item(at_k));
        float delta[2 * kColumnGroups];
        load_pairs(smem.statistics[at_step.stage][1], delta);
#pragma unroll
        for (int i = 0; i < kScoreRegisters; ++i) dp[i] = s[i] * (dp[i] - delta[pair_index(i)]);
        uint32_t ds[kRowSteps][4];
        pack(dp, ds);
        wait_piece_empty(Traits::kDsPiece, item_parity() ^ 1);
        smem.ds_barriers.wait_empty(at_step);
        store_ds(ds);
        ptx::wgmma_fence();
        issue_dv(p);
        hand_over(smem.ds_barriers.full_address(at_step.stage));
        finish_step<kIsFirst>(ds);
    }

    // dk, and dq of the step before.
    template <bool kIsFirst>
    SPLITKV_DEVICE void finish_step(const uint32_t (&ds)[kRowSteps][4]) {
        float dq[kDqRegisters];
        if constexpr (!kIsFirst) smem.ds_barriers.wait_full(at_step.previous());
        ptx::wgmma_fence();
        if constexpr (!kIsFirst) issue_dq(dq);
        issue_dk(ds);
        ptx::wgmma_wait_group<1>();
        if constexpr (!kIsFirst) ptx::pin(dq);
        ptx::pin(dv);
        smem.dout_barriers.release(at_step);
        if constexpr (!kIsFirst) store_dq(dq);
        ptx::wgmma_wait_group<0>();
        ptx::pin(dk);
        smem.q_barriers.release(at_step);
        at_step.advance();
    }

    // dq of the item's last step.
    SPLITKV_DEVICE void last_dq() {
        float dq[kDqRegisters];
        smem.ds_barriers.wait_full(at_step.previous());
        ptx::wgmma_fence();
        issue_dq(dq);
        ptx::wgmma_wait_group<0>();
        ptx::pin(dq);
        smem.k_barriers.release(at_k);
        store_dq(dq);
    }

    // Which of the thread's rows register i of an accumulator [keys, rows] belongs to.
    static SPLITKV_DEVICE constexpr int pair_index(int i) { return 2 * (i / 4) + i % 2; }

    SPLITKV_DEVICE void load_pairs(const float* source, float (&values)[2 * kColumnGroups]) const {
#pragma unroll
        for (int group = 0; group < kColumnGroups; ++group) {
            const float2 pair = *reinterpret_cast<const float2*>(source + row_of_group(group));
            values[2 * group] = pair.x;
            values[2 * group + 1] = pair.y;
        }
    }

    SPLITKV_DEVICE void exponentiate(const float (&lse)[2 * kColumnGroups],
                                     float (&s)[kScoreRegisters]) const {
#pragma unroll
        for (int i = 0; i < kScoreRegisters; ++i) {
            s[i] = ptx::ex2_approx(fmaf(s[i], params.scale_log2, -lse[pair_index(i)]));
        }
    }

    SPLITKV_DEVICE void mask(float (&s)[kScoreRegisters]) const {
#pragma unroll
        for (int group = 0; group < kColumnGroups; ++group) {
            // First key and number of keys, of two rows.
            const int4 limits =
                *reinterpret_cast<const int4*>(smem.limits[at_step.stage][row_of_group(group)]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int32_t key = first_key + 8 * half;
                float* pair = s + 4 * group + 2 * half;
                if (static_cast<uint32_t>(key - limits.x) >= static_cast<uint32_t>(limits.y)) {
                    pair[0] = 0.0f;
                }
                if (static_cast<uint32_t>(key - limits.z) >= static_cast<uint32_t>(limits.w)) {
                    pair[1] = 0.0f;
                }
            }
        }
    }

    // Registers of an accumulator [keys, rows] as left operands of the steps over the rows.
    static SPLITKV_DEVICE void pack(const float (&s)[kScoreRegisters],
                                    uint32_t (&packed)[kRowSteps][4]) {
#pragma unroll
        for (int k = 0; k < kRowSteps; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                packed[k][i] = ptx::cvt_rn_x2<Element>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
            }
        }
    }

    SPLITKV_DEVICE void issue_s(float (&s)[kScoreRegisters]) const {
        const uint32_t q_low =
            uniform(k_major_low(ptx::smem_address(smem.q) + at_step.stage * Traits::kQBytes));
#pragma unroll
        for (int k = 0; k < Traits::kHeadDimQk / kStepK; ++k) {
            ptx::wgmma_ss<Element, 0, 0>(s, descriptor(k_low + k_major_step(k, Traits::kKeys)),
                                         descriptor(q_low + k_major_step(k, Traits::kRows)), k > 0);
        }
        ptx::wgmma_commit_group();
    }

    SPLITKV_DEVICE void issue_dp(float (&dp)[kScoreRegisters]) const {
        const uint32_t dout_low =
            uniform(k_major_low(ptx::smem_address(smem.dout) + at_step.stage * Traits::kDoutBytes));
#pragma unroll
        for (int k = 0; k < Traits::kHeadDimV / kStepK; ++k) {
            ptx::wgmma_ss<Element, 0, 0>(dp, descriptor(v_low + k_major_step(k, Traits::kKeys)),
                                         descriptor(dout_low + k_major_step(k, Traits::kRows)),
                                         k > 0);
        }
        ptx::wgmma_commit_group();
    }

    SPLITKV_DEVICE void issue_dv(const uint32_t (&p)[kRowSteps][4]) {
        const uint32_t dout_low = uniform(mn_major_low(
            ptx::smem_address(smem.dout) + at_step.stage * Traits::kDoutBytes, Traits::kRows));
#pragma unroll
        for (int k = 0; k < kRowSteps; ++k) {
            ptx::wgmma_rs<Element, 1>(dv, p[k], descriptor(dout_low + mn_major_step(k)), 1);
        }
        ptx::wgmma_commit_group();
    }

    SPLITKV_DEVICE void issue_dk(const uint32_t (&ds)[kRowSteps][4]) {
        const uint32_t q_low = uniform(mn_major_low(
            ptx::smem_address(smem.q) + at_step.stage * Traits::kQBytes, Traits::kRows));
#pragma unroll
        for (int k = 0; k < kRowSteps; ++k) {
            ptx::wgmma_rs<Element, 1>(dk, ds[k], descriptor(q_low + mn_major_step(k)), 1);
        }
        ptx::wgmma_commit_group();
    }

    SPLITKV_DEVICE void issue_dq(float (&dq)[kDqRegisters]) const {
        const int row_bytes = Traits::kSplitsDqRows ? consumer * kWarpgroupRows * kRowBytes : 0;
        const uint32_t ds_low = uniform(k_major_low(
            ptx::smem_address(smem.ds) + at_step.previous().stage * Traits::kDsBytes + row_bytes));
#pragma unroll
        for (int k = 0; k < Traits::kKeys / kStepK; ++k) {
            ptx::wgmma_ss<Element, 0, 1>(dq, descriptor(ds_low + k_major_step(k, Traits::kRows)),
                                         descriptor(k_dq_low + mn_major_step(k)), k > 0);
        }
        ptx::wgmma_commit_group();
    }

    // ds to shared memory as [rows, keys], the consumer's 64 keys being one chunk.
    SPLITKV_DEVICE void store_ds(const uint32_t (&ds)[kRowSteps][4]) const {
        // Of the four 8x8 matrices of a store, this lane gives the address of one row of one.
        const int row = lane() / 16 * 8 + lane() % 8;
        const int key_unit = warp() * 2 + lane() / 8 % 2;  // of 8 keys, 16 bytes
        const uint32_t target = ptx::smem_address(smem.ds) + at_step.stage * Traits::kDsBytes +
                                consumer * Traits::kRows * kRowBytes + row * kRowBytes +
                                ((key_unit ^ (row % 8)) << 4);
#pragma unroll
        for (int k = 0; k < kRowSteps; ++k) {
            ptx::stmatrix_x4_trans(target + k * kStepK * kRowBytes, ds[k]);
        }
    }

    SPLITKV_DEVICE void store_dq(const float (&dq)[kDqRegisters]) {
        smem.ds_barriers.release(at_step.previous());
        smem.dq_barriers[consumer].wait_empty(at_step);  // the dq before, in the same buffer
        wait_piece_empty(Traits::kDqPiece, item_parity() ^ 1);
#pragma unroll
        for (int box = 0; box < Traits::kDqBoxes; ++box) {
            store_box(dq + box * kBoxRegisters, params.softmax_scale,
                      ptx::smem_address(smem.dq[consumer]) + box * kBoxBytes);
        }
        hand_over(smem.dq_barriers[consumer].full_address(at_step.previous().stage));
    }

    // Leaves dv and dk for the writer, each piece as soon as its buffer is free.
    template <int kPiece>
    SPLITKV_DEVICE void stage_pieces(bool is_rounded) {
        // No consumer still reads ds.
        if constexpr (kPiece == Traits::kDsPiece) {
            ptx::barrier_sync(kDsBarrier, kConsumerThreads);
        }
        if constexpr (kPiece == Traits::kDqPiece) {
            smem.dq_barriers[consumer].wait_empty_of(at_step.previous());
        }
        // The first piece shares its buffer with the last, also with that of the item before.
        if constexpr (kPiece == 0 && Traits::kHasSpare) {
            wait_piece_empty(Traits::kPieces - 1, item_parity() ^ 1);
        }
        if constexpr (kPiece == 3) wait_piece_empty(0, item_parity());
        constexpr bool kIsDv = kPiece < Traits::kDvPieces;
        constexpr int kColumn = (kIsDv ? kPiece : kPiece - Traits::kDvPieces) * kChunkColumns;
        const float* acc = (kIsDv ? dv : dk) + kColumn / 2;
        const float factor = kIsDv ? 1.0f : params.softmax_scale;
        if (is_rounded) {
            store_rounded<Element, kChunkColumns>(acc, factor,
                                                  piece_box_address(smem, consumer, kPiece, 0));
        } else {
#pragma unroll
            for (int box = 0; box < kChunkColumns / kBoxColumns; ++box) {
                store_box(acc + box * kBoxRegisters, factor,
                          piece_box_address(smem, consumer, kPiece, box));
            }
        }
        hand_over(smem.piece_barriers[consumer].full_address(kPiece));
        if constexpr (kPiece + 1 < Traits::kPieces) stage_pieces<kPiece + 1>(is_rounded);
    }

    SPLITKV_DEVICE uint32_t item_parity() const { return place_of_item(at_k).parity; }

    // Until the writer has read the piece of the item whose parity this is.
    SPLITKV_DEVICE void wait_piece_empty(int piece, uint32_t parity) const {
        ptx::mbarrier_wait(smem.piece_barriers[consumer].empty_address(piece), parity);
    }
};

// What a consumer warpgroup does in the kernel.
template <typename Element, int kDimQk, int kDimV>
SPLITKV_DEVICE void consume_backward(const BackwardKernelParams& params,
                                     BackwardSmem<BackwardTraits<Element, kDimQk, kDimV>>& smem,
                                     int index) {
    using Traits = BackwardTraits<Element, kDimQk, kDimV>;
    ptx::setmaxnreg_inc<Traits::kConsumerRegisters>();
    BackwardConsumer<Traits>(params, smem, index).run();
}

}  // namespace splitkv::sm90
