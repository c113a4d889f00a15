// The producer warpgroup of the backward: one thread that hands out items and loads their tiles,
// and one that adds gradients to global memory.
#pragma once

#include "cuda/sm90/backward_traits.cuh"

namespace splitkv::sm90 {

// One step of the main loop.
struct StepWork {
    int32_t tile;  // of rows
    int32_t tile_head;
    int32_t is_masked;
};

// Calls visit(StepWork) for the steps of an item, in the order of the main loop.
template <typename Visit>
SPLITKV_DEVICE void for_each_step(const BackwardKernelParams& params, const KvTileWork& work,
                                  Visit visit) {
    const int first_head = work.kv_head * params.tile_heads_per_kv_head;
    StepWork step;
    for (step.tile_head = first_head; step.tile_head < first_head + params.tile_heads_per_kv_head;
         ++step.tile_head) {
        for (int i = 0; i < work.num_segments; ++i) {
            const cuda::BackwardSegment segment = params.segments[work.segment_begin + i];
            step.is_masked = segment.is_masked;
            const int end = segment.first_tile + segment.num_tiles;
            for (step.tile = segment.first_tile; step.tile < end; ++step.tile) visit(step);
        }
    }
}

template <typename Traits>
struct BackwardLoader {
    using Smem = BackwardSmem<Traits>;

    static constexpr int kPrefetchSteps = 4;  // before the end of an item; 9 us at head_dim 128

    const BackwardKernelParams& params;
    Smem& smem;
    RingCursor<kBackwardItemSlots> at_work;
    RingCursor<Traits::kKeyStages> at_k;
    RingCursor<Traits::kStages> at_q;
    RingCursor<Traits::kDoutStages> at_dout;

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
            // Stays where it is while the item lasts: registers are scarce.
            const KvTileWork& work = smem.work[at_work.stage];
            publish(work_of(index));
            int steps_left = work.num_steps;
            load_keys(work);
            for_each_step(params, work, [&](const StepWork& step) {
                if (steps_left == kPrefetchSteps) prefetch_gradients(work);
                --steps_left;
                load_rows(step);
            });
            if (work.num_steps < kPrefetchSteps) prefetch_gradients(work);
            index = next;
        }
        KvTileWork end{};
        end.key_begin = -1;
        publish(end);
    }

  private:
    SPLITKV_DEVICE KvTileWork work_of(int index) const {
        const bool head_major = params.is_head_major != 0;
        const int divisor = head_major ? params.num_items : params.num_heads_kv;
        const int quotient = index / divisor;
        const int remainder = index - quotient * divisor;
        const int kv_head = head_major ? quotient : remainder;
        const cuda::BackwardItem item = params.items[head_major ? remainder : quotient];
        KvTileWork work{};
        work.key_begin = item.kv_tile * Traits::kKeys;
        work.kv_head = kv_head;
        work.segment_begin = item.segment_begin;
        work.num_segments = item.num_segments;
        work.num_steps = item.num_steps * params.tile_heads_per_kv_head;
        work.part = item.part;
        const bool is_split = item.num_parts > 1;
        work.turn_index = is_split ? kv_head * params.num_splits + item.split : -1;
        work.sum_row = work.key_begin;
        if (params.rounds) work.sum_row = is_split ? item.split * Traits::kKeys : kIsRounded;
        return work;
    }

    SPLITKV_DEVICE void publish(const KvTileWork& work) {
        smem.work_barriers.wait_empty(at_work);
        smem.work[at_work.stage] = work;
        ptx::mbarrier_arrive(smem.work_barriers.full_address(at_work.stage));
        at_work.advance();
    }

    // First what is free first.
    SPLITKV_DEVICE void load_keys(const KvTileWork& work) {
        if constexpr (Traits::kKeyStages > 1) load_k(work);
        smem.v_barriers.wait_empty(place_of_item(at_k));
        load_boxes<Traits::kVChunks, Traits::kKeys>(&params.v, ptx::smem_address(smem.v),
                                                    smem.v_barriers.full_address(0), work.kv_head,
                                                    work.key_begin, Traits::kVBytes);
        if constexpr (Traits::kKeyStages == 1) load_k(work);
        at_k.advance();
    }

    SPLITKV_DEVICE void load_k(const KvTileWork& work) {
        smem.k_barriers.wait_empty(at_k);
        load_boxes<Traits::kQkChunks, Traits::kKeys>(
            &params.k, ptx::smem_address(smem.k) + at_k.stage * Traits::kKBytes,
            smem.k_barriers.full_address(at_k.stage), work.kv_head, work.key_begin,
            Traits::kKBytes);
    }

    SPLITKV_DEVICE void load_rows(const StepWork& step) {
        const int head = step.tile_head * params.heads_per_tile;
        const int row_begin = params.row_tiles[step.tile].row_begin;
        const int stage = at_q.stage;
        smem.q_barriers.wait_empty(at_q);
        smem.is_masked[stage] = step.is_masked;
        const uint32_t barrier = smem.q_barriers.full_address(stage);
        load_boxes<Traits::kQkChunks, Traits::kRows>(
            &params.q, ptx::smem_address(smem.q) + stage * Traits::kQBytes, barrier, head,
            row_begin, Traits::kQBytes + Traits::kStatisticsBytes + Traits::kLimitsBytes);
        const int64_t tile_index = int64_t{step.tile_head} * params.num_row_tiles + step.tile;
        ptx::cp_async_bulk_load(
            ptx::smem_address(smem.statistics) + stage * Traits::kStatisticsBytes,
            params.statistics + tile_index * 2 * Traits::kRows, Traits::kStatisticsBytes, barrier);
        ptx::cp_async_bulk_load(ptx::smem_address(smem.limits) + stage * Traits::kLimitsBytes,
                                params.limits + int64_t{step.tile} * 2 * Traits::kRows,
                                Traits::kLimitsBytes, barrier);
        at_q.advance();
        smem.dout_barriers.wait_empty(at_dout);
        load_boxes<Traits::kVChunks, Traits::kRows>(
            &params.dout, ptx::smem_address(smem.dout) + at_dout.stage * Traits::kDoutBytes,
            smem.dout_barriers.full_address(at_dout.stage), head, row_begin, Traits::kDoutBytes);
        at_dout.advance();
        if (params.prefetches_dq) prefetch_dq(head, row_begin);
    }

    // Adds that miss L2 hold up those that hit it. Behind the loads, which are needed sooner.
    SPLITKV_DEVICE void prefetch_gradients(const KvTileWork& work) {
        if (!params.accumulates) return;
        for (int row = 0; row < Traits::kKeys; row += kWarpgroupRows) {
            prefetch_boxes<Traits::kHeadDimV>(&params.dv, work.kv_head, work.key_begin + row);
            prefetch_boxes<Traits::kHeadDimQk>(&params.dk, work.kv_head, work.key_begin + row);
        }
    }

    SPLITKV_DEVICE void prefetch_dq(int head, int row_begin) {
        for (int row = 0; row < Traits::kRows; row += kWarpgroupRows) {
            prefetch_boxes<Traits::kHeadDimQk>(&params.dq, head,
                                               row_begin + row / params.heads_per_tile);
        }
    }

    template <int kHeadDim>
    SPLITKV_DEVICE void prefetch_boxes(const CUtensorMap* map, int head, int row) {
#pragma unroll 1
        for (int column = 0; column < kHeadDim; column += kBoxColumns) {
            ptx::cp_async_bulk_prefetch_tensor_3d(map, column, head, row);
        }
    }

    // Rows past the end of the tensor are written as zeros and counted like the others.
    template <int kChunks, int kBoxRows>
    SPLITKV_DEVICE void load_boxes(const CUtensorMap* map, uint32_t target, uint32_t barrier,
                                   int head, int row, uint32_t barrier_bytes) {
        ptx::mbarrier_arrive_expect_tx(barrier, barrier_bytes);
#pragma unroll 1
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            ptx::cp_async_bulk_tensor_3d(target + chunk * kBoxRows * kRowBytes, map, barrier,
                                         chunk * kChunkColumns, head, row);
        }
    }
};

// Adds what the consumers leave in shared memory to dq, dk and dv. Several CTAs add to the same
// rows of dq, in any order or, in deterministic mode, in turn. Two writers take the steps in turn,
// as waiting for a turn, adding and passing it on takes longer than a step; the first also adds dk,
// dv.
template <typename Traits>
struct BackwardWriter {
    using Smem = BackwardSmem<Traits>;

    const BackwardKernelParams& params;
    Smem& smem;
    const int writer;  // 0 .. kWriters - 1
    RingCursor<kBackwardItemSlots> at_work;
    RingCursor<Traits::kDqSlots> at_dq;
    uint32_t piece_parity = 0;

    SPLITKV_DEVICE BackwardWriter(const BackwardKernelParams& p, Smem& s, int index)
        : params(p), smem(s), writer(index) {}

    SPLITKV_DEVICE void run() {
        while (true) {
            smem.work_barriers.wait_full(at_work);
            const KvTileWork& work = smem.work[at_work.stage];
            if (work.key_begin < 0) return;
            for_each_step(params, work, [&](const StepWork& step) {
                if (at_dq.stage / Traits::kDqPieces == writer) {
                    add_dq(work, step);
                } else {
                    for (int piece = 0; piece < Traits::kDqPieces; ++piece) at_dq.advance();
                }
            });
            if (writer == 0) add_dk_dv(work);
            smem.work_barriers.release(at_work);
            at_work.advance();
        }
    }

  private:
    SPLITKV_DEVICE void add_dq(const KvTileWork& work, const StepWork& step) {
        const cuda::BackwardRowTile row_tile = params.row_tiles[step.tile];
        int32_t* turn = nullptr;
        if (params.dq_turns != nullptr) {
            // Asked for before dq is there, so that the answer is, too.
            turn = params.dq_turns + step.tile_head * params.num_row_tiles + step.tile;
            wait_for_turn(turn, work.key_begin / Traits::kKeys - row_tile.first_kv_tile);
        }
        for (int piece = 0; piece < Traits::kDqPieces; ++piece) {
            add_dq_piece(step, row_tile.row_begin, piece * Traits::kDqBoxes * kBoxColumns);
            at_dq.advance();
        }
        if (turn != nullptr) pass_turn(turn);
    }

    SPLITKV_DEVICE void add_dq_piece(const StepWork& step, int row_begin, int first_column) {
#pragma unroll
        for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
            smem.dq_barriers[consumer].wait_full(at_dq);
            // Whole query rows: heads_per_tile divides the 64 rows of a consumer.
            const int row =
                Traits::kSplitsDqRows ? consumer * kWarpgroupRows / params.heads_per_tile : 0;
            const int column =
                first_column + (Traits::kSplitsDqRows ? 0 : consumer * Traits::kDqColumns);
#pragma unroll
            for (int box = 0; box < Traits::kDqBoxes; ++box) {
                ptx::cp_reduce_async_bulk_tensor_3d_add(
                    &params.dq, ptx::smem_address(smem.dq[consumer]) + box * kBoxBytes,
                    column + box * kBoxColumns, step.tile_head * params.heads_per_tile,
                    row_begin + row);
            }
            ptx::cp_async_bulk_commit_group();
        }
        // Each consumer gets its buffer back as soon as its add has read it.
        static_assert(Traits::kConsumers == 2, "written out for two groups of adds");
        ptx::cp_async_bulk_wait_group_read<1>();
        smem.dq_barriers[0].release(at_dq);
        ptx::cp_async_bulk_wait_group_read<0>();
        smem.dq_barriers[1].release(at_dq);
    }

    SPLITKV_DEVICE void add_dk_dv(const KvTileWork& work) {
        int32_t* turn = nullptr;
        if (work.turn_index >= 0) {
            turn = params.part_turns + work.turn_index;
            wait_for_turn(turn, work.part);
        }
        for (int piece = 0; piece < Traits::kPieces; ++piece) {
            add_piece(work, piece);
            // With one buffer these adds, else all but these, have read theirs.
            ptx::cp_async_bulk_wait_group_read<Traits::kHasOneBuffer ? 0 : 1>();
            const int read_piece = Traits::kHasOneBuffer ? piece : piece - 1;
            if (read_piece >= 0) release_piece(read_piece);
        }
        if constexpr (!Traits::kHasOneBuffer) {
            ptx::cp_async_bulk_wait_group_read<0>();
            release_piece(Traits::kPieces - 1);
        }
        piece_parity ^= 1;
        if (turn != nullptr) pass_turn(turn);
    }

    SPLITKV_DEVICE void add_piece(const KvTileWork& work, int piece) {
        const bool is_dv = piece < Traits::kDvPieces;
        const CUtensorMap* map = is_dv ? &params.dv : &params.dk;
        const CUtensorMap* rounded_map = is_dv ? &params.rounded_dv : &params.rounded_dk;
        const int first_column =
            (is_dv ? piece : piece - Traits::kDvPieces) * Traits::kPieceColumns;
        const int consumer_columns = is_dv ? Traits::kDvColumns : Traits::kDkColumns;
#pragma unroll
        for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
            ptx::mbarrier_wait(smem.piece_barriers[consumer].full_address(piece), piece_parity);
            const int row = Traits::kSplitsKeys ? consumer * kWarpgroupRows : 0;
            const int column =
                first_column + (Traits::kSplitsKeys ? 0 : consumer * consumer_columns);
            if (work.sum_row == kIsRounded) {
                ptx::cp_async_bulk_tensor_3d_store(rounded_map,
                                                   piece_box_address(smem, consumer, piece, 0),
                                                   column, work.kv_head, work.key_begin + row);
                continue;
            }
#pragma unroll
            for (int box = 0; box < Traits::kPieceColumns / kBoxColumns; ++box) {
                write_box(work, map, piece_box_address(smem, consumer, piece, box),
                          column + box * kBoxColumns, work.sum_row + row);
            }
        }
        ptx::cp_async_bulk_commit_group();
    }

    // The first part of a KV tile overwrites, where dk and dv are not accumulated into.
    SPLITKV_DEVICE void write_box(const KvTileWork& work, const CUtensorMap* map, uint32_t source,
                                  int column, int row) {
        if (params.accumulates || work.part > 0) {
            ptx::cp_reduce_async_bulk_tensor_3d_add(map, source, column, work.kv_head, row);
        } else {
            ptx::cp_async_bulk_tensor_3d_store(map, source, column, work.kv_head, row);
        }
    }

    SPLITKV_DEVICE void release_piece(int piece) {
#pragma unroll
        for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
            ptx::mbarrier_arrive(smem.piece_barriers[consumer].empty_address(piece));
        }
    }

    // Waits until a counter in global memory has reached `turn`. Whoever comes earlier was handed
    // out earlier, so the earliest never waits and every wait ends.
    SPLITKV_DEVICE void wait_for_turn(const int32_t* counter, int32_t turn) {
        while (ptx::ld_acquire_gpu(counter) < turn) {
        }
        ptx::fence_proxy_async_global();
    }

    // Lets the next one add, when this thread's adds are complete.
    SPLITKV_DEVICE void pass_turn(int32_t* counter) {
        ptx::cp_async_bulk_wait_group<0>();
        ptx::fence_proxy_async_global();
        ptx::red_release_gpu_add(counter, 1);
    }
};

}  // namespace splitkv::sm90
