// The consumers of the forward: each warpgroup owns 64 rows of the tile.
//
//   first tile        s = q . k^T, softmax
//   each other tile   s = q . k^T and o += p . v of the tile before, issued back to back; softmax
//   of
//                     s runs while p . v still does
//   last              o += p . v
//
// Key tiles are walked from last to first: masked ones, whole ones without mask code, masked ones.
// The warpgroups take turns at the tensor cores (ping-pong), so that the softmax of one runs under
// the products of the others.
#pragma once

#include "cuda/sm90/forward_softmax.cuh"
#include "cuda/sm90/forward_traits.cuh"

namespace splitkv::sm90 {

template <typename Traits>
struct ForwardConsumer {
    using Smem = ForwardSmem<Traits>;
    using Element = typename Traits::Element;
    static constexpr int kScoreRegisters = Traits::kKeys / 2;
    static constexpr int kOutRegisters = Traits::kHeadDimV / 2;
    static constexpr int kColumnGroups = Traits::kKeys / 8;
    static constexpr int kFirstBarrier = 1;  // named barrier of consumer 0; 0 is __syncthreads
    static constexpr int kTurnThreads = 2 * kWarpgroupThreads;  // who waits, and who let it go

    const ForwardKernelParams& params;
    Smem& smem;
    const int consumer;  // 0 .. kConsumers - 1
    RingCursor<kItemSlots> at_work;
    RingCursor<1> at_q;
    RingCursor<Traits::kStages> at_k;
    RingCursor<Traits::kStages> at_v;
    uint32_t q_low;

    RowIntervals rows;
    SoftmaxState state;
    float o[kOutRegisters];
    uint32_t p[Traits::kKeys / kStepK][4];

    SPLITKV_DEVICE ForwardConsumer(const ForwardKernelParams& in, Smem& s, int index)
        : params(in), smem(s), consumer(index) {
        q_low =
            uniform(k_major_low(ptx::smem_address(smem.q) + consumer * kWarpgroupRows * kRowBytes));
        if (consumer == Traits::kConsumers - 1) pass_turn();
    }

    SPLITKV_DEVICE bool is_leader() const { return threadIdx.x % kWarpgroupThreads == 0; }

    // Reads the next item; false at the end. All fields are uniform over the warp.
    SPLITKV_DEVICE bool next_work(TileWork* work) {
        smem.work_barriers.wait_full(at_work);
        const auto* fields = reinterpret_cast<const int4*>(&smem.work[at_work.stage]);
        const int4 low = fields[0];
        const int4 high = fields[1];
        work->row_begin = uniform(low.x);
        work->num_rows = uniform(low.y);
        work->key_begin = uniform(low.z);
        work->num_tiles = uniform(low.w);
        work->full_begin = uniform(high.x);
        work->full_end = uniform(high.y);
        work->part_row = uniform(high.z);
        work->first_head = uniform(high.w);
        __syncwarp();
        if (threadIdx.x % 32 == 0) smem.work_barriers.release(at_work);
        at_work.advance();
        return work->row_begin >= 0;
    }

    // Leaves the unscaled output in o, and maximum and sum in state.
    SPLITKV_DEVICE void attend(const TileWork& work) {
        state.reset();
#pragma unroll
        for (int i = 0; i < kOutRegisters; ++i) o[i] = 0.0f;
        if (work.num_tiles == 0) return;
        int tile = work.num_tiles - 1;
        first_tile(work.key_begin + tile * Traits::kKeys);
        for (--tile; tile >= work.full_end; --tile) {
            next_tile<true>(work.key_begin + tile * Traits::kKeys);
        }
        for (; tile >= work.full_begin; --tile) next_tile<false>(0);
        for (; tile >= 0; --tile) next_tile<true>(work.key_begin + tile * Traits::kKeys);
        // Every read of q is complete.
        if (is_leader()) smem.q_barriers.release(at_q);
        at_q.advance();
        smem.v_barriers.wait_full(at_v);
        ptx::wgmma_fence();
        issue_pv();
        ptx::wgmma_wait_group<0>();
        ptx::pin(o);
        release_v();
    }

  private:
    SPLITKV_DEVICE void wait_turn() {
        if constexpr (Traits::kConsumers > 1) {
            ptx::barrier_sync(kFirstBarrier + consumer, kTurnThreads);
        }
    }
    SPLITKV_DEVICE void pass_turn() {
        if constexpr (Traits::kConsumers > 1) {
            const int next = consumer + 1 == Traits::kConsumers ? 0 : consumer + 1;
            ptx::barrier_arrive(kFirstBarrier + next, kTurnThreads);
        }
    }

    SPLITKV_DEVICE void issue_qk(float (&s)[kScoreRegisters]) {
        const uint32_t k_low =
            uniform(k_major_low(ptx::smem_address(smem.k) + at_k.stage * Traits::kKBytes));
#pragma unroll
        for (int k = 0; k < Traits::kHeadDimQk / kStepK; ++k) {
            ptx::wgmma_ss<Element, 0, 0>(s, descriptor(q_low + k_major_step(k, Traits::kRows)),
                                         descriptor(k_low + k_major_step(k, Traits::kKeys)), k > 0);
        }
        ptx::wgmma_commit_group();
    }

    SPLITKV_DEVICE void issue_pv() {
        const uint32_t v_low = uniform(
            mn_major_low(ptx::smem_address(smem.v) + at_v.stage * Traits::kVBytes, Traits::kKeys));
#pragma unroll
        for (int k = 0; k < Traits::kKeys / kStepK; ++k) {
            ptx::wgmma_rs<Element, 1>(o, p[k], descriptor(v_low + mn_major_step(k)), 1);
        }
        ptx::wgmma_commit_group();
    }

    SPLITKV_DEVICE void release_k() {
        if (is_leader()) smem.k_barriers.release(at_k);
        at_k.advance();
    }
    SPLITKV_DEVICE void release_v() {
        if (is_leader()) smem.v_barriers.release(at_v);
        at_v.advance();
    }

    SPLITKV_DEVICE void first_tile(int first_key) {
        float s[kScoreRegisters];
        smem.q_barriers.wait_full(at_q);
        smem.k_barriers.wait_full(at_k);
        ptx::wgmma_fence();
        issue_qk(s);
        ptx::wgmma_wait_group<0>();
        ptx::pin(s);
        release_k();
        mask_scores(rows, first_key, s);
        float shift[kRowsPerThread];
        float alpha[kRowsPerThread];
        update_max(s, params.scale_log2, &state, shift, alpha);
#pragma unroll
        for (int row = 0; row < kRowsPerThread; ++row) {
            exponentiate(row, 0, kColumnGroups, params.scale_log2, shift[row], s, &state);
        }
        pack_probs<Element>(s, p);
    }

    template <bool kIsMasked>
    SPLITKV_DEVICE void next_tile(int first_key) {
        float s[kScoreRegisters];
        smem.k_barriers.wait_full(at_k);
        wait_turn();
        ptx::wgmma_fence();
        issue_qk(s);
        // Waiting for v only now lets q . k^T start early; it needs a fence of its own.
        smem.v_barriers.wait_full(at_v);
        ptx::wgmma_fence();
        issue_pv();
        pass_turn();
        ptx::wgmma_wait_group<1>();
        ptx::pin(s);
        release_k();
        if constexpr (kIsMasked) mask_scores(rows, first_key, s);
        softmax_under_pv(s);
    }

    // Softmax of s, and in its midst the wait for p . v and the rescaling of o.
    SPLITKV_DEVICE void softmax_under_pv(float (&s)[kScoreRegisters]) {
        constexpr int kQuarters = Traits::kTile.quarters_before_wait;
        constexpr int kBefore = kColumnGroups * kQuarters / 4;
        const float scale = params.scale_log2;
        float shift[kRowsPerThread];
        float alpha[kRowsPerThread];
        update_max(s, scale, &state, shift, alpha);
#pragma unroll
        for (int row = 0; row < kRowsPerThread; ++row) state.sum[row] *= alpha[row];
        exponentiate(0, 0, kBefore, scale, shift[0], s, &state);
        // ptxas moves arithmetic across the wait at will; this pins what precedes it.
        constexpr float kAboveAlphas = 3.0f;  // each alpha is at most 1
        constexpr float kAboveSums = 1e30f;   // a sum is at most the number of keys
        const float done = (kBefore == 0 ? alpha[0] : state.sum[0]) + alpha[1];
        ptx::st_shared_if_above(ptx::smem_address(&smem.never_written), done,
                                kBefore == 0 ? kAboveAlphas : kAboveSums);
        ptx::wgmma_wait_group<0>();
        ptx::pin(o);
        release_v();
        exponentiate(0, kBefore, kColumnGroups, scale, shift[0], s, &state);
        exponentiate(1, 0, kColumnGroups, scale, shift[1], s, &state);
        rescale(alpha, o);
        pack_probs<Element>(s, p);
    }
};

}  // namespace splitkv::sm90
