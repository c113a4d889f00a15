// The producer warpgroup of the backward: one thread that hands out items and loads their tiles,
// and one that adds dq to global memory.
#pragma once

#include "cuda/sm90/backward_traits.cuh"

namespace splitkv::sm90 {

// Waits until a counter in global memory has reached `turn`. Whoever comes earlier was handed out
// earlier, so the earliest never waits and every wait ends.
SPLITKV_DEVICE void wait_for_turn(const int32_t* counter, int32_t turn) {
    while (ptx::ld_acquire_gpu(counter) < turn) {
    }
}

template <typename Traits>
struct BackwardLoader {
    using Smem = BackwardSmem<Traits>;

    const BackwardKernelParams& params;
    Smem& smem;
    RingCursor<kBackwardItemSlots> at_work;
    RingCursor<1> at_k;
    RingCursor<1> at_v;
    RingCursor<Traits::kStages> at_q;
    RingCursor<Traits::kStages> at_dout;

    SPLITKV_DEVICE BackwardLoader(const BackwardKernelParams& p, Smem& s) : params(p), smem(s) {}

    SPLITKV_DEVICE void run() {
        const int num_work = params.num_items * params.num_heads_kv;
        int index = static_cast<int>(blockIdx.x);
        while (index < num_work) {
            // Asked for now, needed after this item's loads have been issued.
            int next = num_work;
            if (num_work > static_cast<int>(gridDim.x)) {
                next = static_cast<int>(gridDim.x) + atomicAdd(params.counter, 1);
            }
            load_item(index);
            index = next;
        }
        KvTileWork end{};
        end.key_begin = -1;
        publish(end);
    }

  private:
    SPLITKV_DEVICE void load_item(int index) {
        const bool head_major = params.is_head_major != 0;
        const int divisor = head_major ? params.num_items : params.num_heads_kv;
        const int quotient = index / divisor;
        const int remainder = index - quotient * divisor;
        const int kv_head = head_major ? quotient : remainder;
        const cuda::BackwardItem item = params.items[head_major ? remainder : quotient];
        KvTileWork work{};
        work.key_begin = item.kv_tile * Traits::kKeys;
        work.kv_head = kv_head;
        work.num_steps = item.num_steps * params.tile_heads_per_kv_head;
        work.part = item.part;
        work.turn_index = item.num_parts > 1 ? kv_head * params.num_splits + item.split : -1;
        publish(work);
        smem.k_barriers.wait_empty(at_k);
        load_boxes<Traits::kQkChunks, Traits::kKeys>(&params.k, smem.k,
                                                     smem.k_barriers.full_address(0), kv_head,
                                                     work.key_begin, Traits::kKBytes);
        at_k.advance();
        smem.v_barriers.wait_empty(at_v);
        load_boxes<Traits::kVChunks, Traits::kKeys>(&params.v, smem.v,
                                                    smem.v_barriers.full_address(0), kv_head,
                                                    work.key_begin, Traits::kVBytes);
        at_v.advance();
        for (int i = 0; i < params.tile_heads_per_kv_head; ++i) {
            load_rows(item, kv_head * params.tile_heads_per_kv_head + i);
        }
    }

    SPLITKV_DEVICE void load_rows(const cuda::BackwardItem& item, int tile_head) {
        for (int i = 0; i < item.num_segments; ++i) {
            const cuda::BackwardSegment segment = params.segments[item.segment_begin + i];
            for (int tile = segment.first_tile; tile < segment.first_tile + segment.num_tiles;
                 ++tile) {
                load_step(item.kv_tile, tile, tile_head, segment.is_masked);
            }
        }
    }

    SPLITKV_DEVICE void load_step(int kv_tile, int tile, int tile_head, int is_masked) {
        const cuda::BackwardRowTile row_tile = params.row_tiles[tile];
        const int head = tile_head * params.heads_per_tile;
        const int tile_index = tile_head * params.num_row_tiles + tile;
        StepWork step{};
        step.row_begin = row_tile.row_begin;
        step.first_head = head;
        step.is_masked = is_masked;
        step.turn = kv_tile - row_tile.first_kv_tile;
        step.turn_index = tile_index;

        smem.q_barriers.wait_empty(at_q);
        smem.steps[at_q.stage] = step;
        const uint32_t barrier = smem.q_barriers.full_address(at_q.stage);
        load_boxes<Traits::kQkChunks, Traits::kRows>(
            &params.q, smem.q[at_q.stage], barrier, head, row_tile.row_begin,
            Traits::kQBytes + Traits::kStatisticsBytes + Traits::kLimitsBytes);
        ptx::cp_async_bulk_load(ptx::smem_address(smem.statistics[at_q.stage]),
                                params.statistics + int64_t{tile_index} * 2 * Traits::kRows,
                                Traits::kStatisticsBytes, barrier);
        ptx::cp_async_bulk_load(ptx::smem_address(smem.limits[at_q.stage]),
                                params.limits + int64_t{tile} * 2 * Traits::kRows,
                                Traits::kLimitsBytes, barrier);
        at_q.advance();
        smem.dout_barriers.wait_empty(at_dout);
        load_boxes<Traits::kVChunks, Traits::kRows>(&params.dout, smem.dout[at_dout.stage],
                                                    smem.dout_barriers.full_address(at_dout.stage),
                                                    head, row_tile.row_begin, Traits::kDoutBytes);
        at_dout.advance();
    }

    SPLITKV_DEVICE void publish(const KvTileWork& work) {
        smem.work_barriers.wait_empty(at_work);
        smem.work[at_work.stage] = work;
        ptx::mbarrier_arrive(smem.work_barriers.full_address(at_work.stage));
        at_work.advance();
    }

    // Rows past the end of the tensor are written as zeros and counted like the others.
    template <int kChunks, int kBoxRows>
    SPLITKV_DEVICE void load_boxes(const CUtensorMap* map, const uint8_t* target, uint32_t barrier,
                                   int head, int row, uint32_t barrier_bytes) {
        ptx::mbarrier_arrive_expect_tx(barrier, barrier_bytes);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            ptx::cp_async_bulk_tensor_3d(ptx::smem_address(target) + chunk * kBoxRows * kRowBytes,
                                         map, barrier, chunk * kChunkColumns, head, row);
        }
    }
};

// Adds each consumer's part of dq as soon as it lies in shared memory. Several CTAs add to the same
// rows; in deterministic mode each waits for its turn.
template <typename Traits>
struct DqWriter {
    using Smem = BackwardSmem<Traits>;

    const BackwardKernelParams& params;
    Smem& smem;
    RingCursor<1> at_dq;

    SPLITKV_DEVICE DqWriter(const BackwardKernelParams& p, Smem& s) : params(p), smem(s) {}

    SPLITKV_DEVICE void run() {
        const bool takes_turns = params.dq_turns != nullptr;
        while (true) {
            smem.dq_barriers[0].wait_full(at_dq);
            const StepWork step = smem.dq_steps[0];
            if (step.row_begin < 0) return;
            int32_t* turn = params.dq_turns + step.turn_index;
            if (takes_turns) {
                wait_for_turn(turn, step.turn);
                ptx::fence_proxy_async_global();
            }
#pragma unroll
            for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
                if (consumer > 0) smem.dq_barriers[consumer].wait_full(at_dq);
                add(step, consumer);
            }
            release<0>();
            at_dq.advance();
            if (takes_turns) {
                ptx::cp_async_bulk_wait_group<0>();
                ptx::fence_proxy_async_global();
                ptx::red_release_gpu_add(turn, 1);
            }
        }
    }

  private:
    SPLITKV_DEVICE void add(const StepWork& step, int consumer) {
        const int column = Traits::kSplitsDqRows ? 0 : consumer * Traits::kDqColumns;
        // Whole query rows: heads_per_tile divides the 64 rows of a consumer.
        const int row =
            step.row_begin +
            (Traits::kSplitsDqRows ? consumer * kWarpgroupRows / params.heads_per_tile : 0);
        const uint32_t source = ptx::smem_address(smem.dq[consumer]);
#pragma unroll
        for (int box = 0; box < Traits::kDqBoxes; ++box) {
            ptx::cp_reduce_async_bulk_tensor_3d_add(&params.dq, source + box * Traits::kDqBoxBytes,
                                                    column + box * kDqBoxColumns, step.first_head,
                                                    row);
        }
        ptx::cp_async_bulk_commit_group();
    }

    // Gives each consumer its buffer back as soon as its adds have read it.
    template <int kConsumer>
    SPLITKV_DEVICE void release() {
        ptx::cp_async_bulk_wait_group_read<Traits::kConsumers - 1 - kConsumer>();
        smem.dq_barriers[kConsumer].release(at_dq);
        if constexpr (kConsumer + 1 < Traits::kConsumers) release<kConsumer + 1>();
    }
};

}  // namespace splitkv::sm90
