// The producer of the forward: one thread that hands out items and loads their tiles.
#pragma once

#include "cuda/sm90/forward_traits.cuh"

namespace splitkv::sm90 {

template <typename Traits>
struct ForwardProducer {
    using Smem = ForwardSmem<Traits>;

    const ForwardKernelParams& params;
    Smem& smem;
    RingCursor<kItemSlots> at_work;
    RingCursor<1> at_q;
    RingCursor<Traits::kStages> at_k;
    RingCursor<Traits::kStages> at_v;

    SPLITKV_DEVICE ForwardProducer(const ForwardKernelParams& p, Smem& s) : params(p), smem(s) {}

    SPLITKV_DEVICE void run() {
        ptx::prefetch_tensormap(&params.k);
        ptx::prefetch_tensormap(&params.v);
        ptx::prefetch_tensormap(&params.q);
        const int num_work = params.num_items * params.num_tile_heads;
        int index = static_cast<int>(blockIdx.x);
        while (index < num_work) {
            // Asked for now, needed after this item's loads have been issued.
            int next = num_work;
            if (num_work > static_cast<int>(gridDim.x)) {
                next = static_cast<int>(gridDim.x) + atomicAdd(params.counter, 1);
            }
            const TileWork work = work_of(index);
            publish(work);
            if (work.num_tiles > 0) load(work);
            index = next;
        }
        TileWork end{};
        end.row_begin = -1;
        publish(end);
    }

  private:
    SPLITKV_DEVICE TileWork work_of(int index) const {
        const bool head_major = params.is_head_major != 0;
        const int divisor = head_major ? params.num_items : params.num_tile_heads;
        const int quotient = index / divisor;
        const int remainder = index - quotient * divisor;
        const int item_index = head_major ? remainder : quotient;
        const int head = head_major ? quotient : remainder;
        const auto* fields = reinterpret_cast<const int4*>(params.items + item_index);
        const int4 low = fields[0];
        const int4 high = fields[1];
        return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, head * params.heads_per_tile};
    }

    SPLITKV_DEVICE void publish(const TileWork& work) {
        smem.work_barriers.wait_empty(at_work);
        smem.work[at_work.stage] = work;
        ptx::mbarrier_arrive(smem.work_barriers.full_address(at_work.stage));
        at_work.advance();
    }

    SPLITKV_DEVICE void load(const TileWork& work) {
        const int kv_head = work.first_head / params.group;
        load_q(work);
        // From the last tile to the first, as the consumers walk.
        for (int tile = work.num_tiles - 1; tile >= 0; --tile) {
            const int key = work.key_begin + tile * Traits::kKeys;
            smem.k_barriers.wait_empty(at_k);
            load_tile<Traits::kQkChunks, Traits::kKBytes>(&params.k, smem.k[at_k.stage],
                                                          smem.k_barriers.full_address(at_k.stage),
                                                          kv_head, key);
            at_k.advance();
            smem.v_barriers.wait_empty(at_v);
            load_tile<Traits::kVChunks, Traits::kVBytes>(&params.v, smem.v[at_v.stage],
                                                         smem.v_barriers.full_address(at_v.stage),
                                                         kv_head, key);
            at_v.advance();
        }
    }

    SPLITKV_DEVICE void load_q(const TileWork& work) {
        smem.q_barriers.wait_empty(at_q);
        const uint32_t barrier = smem.q_barriers.full_address(0);
        // Whole query rows of heads_per_tile heads; rows of the tile beyond them stay as they are.
        const int box_rows = Traits::kRows / params.heads_per_tile * params.heads_per_tile;
        ptx::mbarrier_arrive_expect_tx(barrier, box_rows * Traits::kHeadDimQk * 2);
#pragma unroll
        for (int chunk = 0; chunk < Traits::kQkChunks; ++chunk) {
            ptx::cp_async_bulk_tensor_3d(
                ptx::smem_address(smem.q) + chunk * Traits::kRows * kRowBytes, &params.q, barrier,
                chunk * kChunkColumns, work.first_head, work.row_begin);
        }
        at_q.advance();
    }

    template <int kChunks, int kBytes>
    SPLITKV_DEVICE void load_tile(const CUtensorMap* map, const uint8_t* target, uint32_t barrier,
                                  int kv_head, int key) {
        // Rows past the end of the tensor are written as zeros and counted like the others.
        ptx::mbarrier_arrive_expect_tx(barrier, kBytes);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            const uint32_t chunk_target =
                ptx::smem_address(target) + chunk * Traits::kKeys * kRowBytes;
            const int column = chunk * kChunkColumns;
            if constexpr (Traits::kReadsKeysOnce) {
                ptx::cp_async_bulk_tensor_3d_hint(chunk_target, map, barrier, column, kv_head, key,
                                                  ptx::createpolicy_evict_first());
            } else {
                ptx::cp_async_bulk_tensor_3d(chunk_target, map, barrier, column, kv_head, key);
            }
        }
    }
};

}  // namespace splitkv::sm90
