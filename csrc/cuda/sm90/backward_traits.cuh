// Types, sizes and shared memory of the backward kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/params.h"
#include "cuda/backward_work.h"
#include "cuda/sm90/descriptor.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/tiles.h"

namespace splitkv::sm90 {

inline constexpr int kBackwardItemSlots = 2;  // the loader is at most one item ahead
inline constexpr int kWriters = 2;
inline constexpr int kBoxColumns = 32;                        // fp32 columns of a 128-byte row
inline constexpr int kBoxBytes = kWarpgroupRows * kRowBytes;  // [64 rows, 32 columns]

// A KV tile of one KV head, as the loader hands it to the writer and the consumers.
struct alignas(16) KvTileWork {
    int32_t key_begin;  // -1: no more work
    int32_t kv_head;
    int32_t segment_begin;
    int32_t num_segments;
    int32_t num_steps;  // over all segments and tile heads
    int32_t part;
    int32_t turn_index;  // counter of parts, -1 where there is one part
    // First row of the item's share in the fp32 dk and dv; kIsRounded: written once, in 16 bits.
    int32_t sum_row;
};
inline constexpr int kIsRounded = -1;

struct BackwardKernelParams {
    CUtensorMap q;                           // [Tq, Hq, D], boxes of one row tile
    CUtensorMap dout;                        // [Tq, Hq, Dv], boxes of one row tile
    CUtensorMap k;                           // [Tk, Hkv, D], boxes of one KV tile
    CUtensorMap v;                           // [Tk, Hkv, Dv], boxes of one KV tile
    CUtensorMap dq;                          // [Tq, Hq, D], fp32, boxes of a consumer's rows
    CUtensorMap dk;                          // [.., Hkv, D], fp32, boxes of a consumer's keys
    CUtensorMap dv;                          // [.., Hkv, Dv], fp32, boxes of a consumer's keys
    CUtensorMap rounded_dk;                  // [Tk, Hkv, D], 16 bits, or empty
    CUtensorMap rounded_dv;                  // [Tk, Hkv, Dv], 16 bits, or empty
    const cuda::BackwardItem* items;         // [num_items]
    const cuda::BackwardRowTile* row_tiles;  // [num_row_tiles]
    const cuda::BackwardSegment* segments;   // [num_segments]
    const float* statistics;  // [tile heads, num_row_tiles, 2, rows]: lse in log2, delta
    const int32_t* limits;    // [num_row_tiles, rows, 2]: first key and number of keys
    int32_t* counter;         // hands out items beyond the first of each CTA
    int32_t* part_turns;      // [Hkv, num_splits]
    int32_t* dq_turns;        // [tile heads, num_row_tiles]; null unless deterministic
    int32_t num_items;
    int32_t num_row_tiles;
    int32_t num_splits;
    int32_t num_heads_kv;
    int32_t heads_per_tile;
    int32_t tile_heads_per_kv_head;
    int32_t is_head_major;
    int32_t prefetches_dq;
    int32_t accumulates;  // into dk and dv; else they are overwritten
    int32_t rounds;       // dk and dv to 16 bits; those of split KV tiles are summed in fp32 first
    float softmax_scale;
    float scale_log2;  // softmax_scale * log2(e)
};

template <typename ElementType, int kDimQk, int kDimV>
struct BackwardTraits {
    using Element = ElementType;  // of q, k, v and dout; 16 bits
    static constexpr int kHeadDimQk = kDimQk;
    static constexpr int kHeadDimV = kDimV;
    static constexpr BackwardTile kTile = backward_tile(kDimQk, kDimV);
    static constexpr int kRows = kTile.rows;
    static constexpr int kKeys = kTile.keys;
    static constexpr int kConsumers = kTile.consumers;
    static constexpr int kStages = kTile.q_stages;
    static constexpr int kDoutStages = kTile.dout_stages;
    static constexpr int kDsStages = kStages;
    static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
    static constexpr int kQkChunks = kDimQk / kChunkColumns;
    static constexpr int kVChunks = kDimV / kChunkColumns;
    static constexpr int kQBytes = kRows * kDimQk * 2;
    static constexpr int kDoutBytes = kRows * kDimV * 2;
    static constexpr int kKBytes = kKeys * kDimQk * 2;
    static constexpr int kVBytes = kKeys * kDimV * 2;
    static constexpr int kDsBytes = kRows * kKeys * 2;
    static constexpr int kStatisticsBytes = kRows * 2 * 4;
    static constexpr int kLimitsBytes = kRows * 2 * 4;
    // A consumer's part of dq: 64 of the 128 rows, or half of the columns of all 64 rows.
    static constexpr bool kSplitsDqRows = kRows == kConsumers * kWarpgroupRows;
    static constexpr int kDqColumns = kSplitsDqRows ? kDimQk : kDimQk / kConsumers;
    static constexpr int kDqPieces = 1;  // all at once
    static constexpr int kDqSlots = kWriters * kDqPieces;
    static constexpr int kDqBoxes = kDqColumns / kBoxColumns;  // of one consumer
    static constexpr int kDqBytes = kDqBoxes * kBoxBytes;
    // dv, then dk of a consumer leave in pieces of 64 columns. Each is staged in one of the
    // consumer's buffers, first what is free first: a spare one, its part of ds, that of dq.
    static constexpr bool kSplitsKeys = true;
    static constexpr int kDkColumns = kDimQk;
    static constexpr int kDvColumns = kDimV;
    static constexpr int kPieceColumns = kChunkColumns;
    static constexpr int kDvPieces = kDvColumns / kPieceColumns;
    static constexpr int kPieces = kDvPieces + kDkColumns / kPieceColumns;
    static constexpr int kPieceBytes = 2 * kBoxBytes;
    static constexpr bool kHasOneBuffer = false;
    static constexpr bool kHasSpare = kPieces > 2;      // for the first piece and the last
    static constexpr int kDsPiece = kHasSpare ? 1 : 0;  // the one that is staged where ds was
    static constexpr int kDqPiece = kDsPiece + 1;
    // Where there is room, k of the next item comes during this one.
    static constexpr int kKeyStages = kHasSpare ? 1 : 2;
    static constexpr int kProducerRegisters = 40;
    static constexpr int kConsumerRegisters = 232;

    static_assert(kTile.keys > 0 && !kTile.is_wide, "no such tile is listed for these head dims");
    static_assert(kStages == kWriters && kDoutStages == kStages,
                  "one cursor for all that a step passes through");
    static_assert(kKeys == kConsumers * kWarpgroupRows, "each consumer owns 64 keys");
    static_assert(kSplitsDqRows || kRows == kWarpgroupRows,
                  "the rows of dq go to the consumers, or all to each of them");
    static_assert(kDqColumns % kChunkColumns == 0, "a consumer's dq takes whole chunks of k");
    static_assert(kPieces == 2 || kPieces == 4, "buffers for other numbers are not laid out");
    static_assert(kDqBytes >= kPieceBytes && kRows * kDsStages * kRowBytes >= kPieceBytes,
                  "a piece fits where a consumer's dq or ds was");
    static_assert(kDimQk % kChunkColumns == 0 && kDimV % kChunkColumns == 0,
                  "tiles are made of chunks of 64 columns");
};

template <typename Traits>
struct BackwardSmem {
    alignas(kSwizzleBytes) uint8_t k[Traits::kKeyStages][Traits::kKBytes];
    alignas(kSwizzleBytes) uint8_t v[Traits::kVBytes];
    alignas(kSwizzleBytes) uint8_t q[Traits::kStages][Traits::kQBytes];
    alignas(kSwizzleBytes) uint8_t dout[Traits::kStages][Traits::kDoutBytes];
    alignas(kSwizzleBytes) uint8_t ds[Traits::kDsStages][Traits::kDsBytes];
    alignas(kSwizzleBytes) uint8_t dq[Traits::kConsumers][Traits::kDqBytes];
    alignas(kSwizzleBytes) uint8_t spare[Traits::kHasSpare ? Traits::kConsumers : 1]
                                        [Traits::kHasSpare ? Traits::kPieceBytes : kSwizzleBytes];
    alignas(16) float statistics[Traits::kStages][2][Traits::kRows];
    alignas(16) int32_t limits[Traits::kStages][Traits::kRows][2];
    int32_t is_masked[Traits::kStages];
    KvTileWork work[kBackwardItemSlots];
    RingBarriers<kBackwardItemSlots> work_barriers;
    RingBarriers<Traits::kKeyStages> k_barriers;
    RingBarriers<1> v_barriers;
    RingBarriers<Traits::kStages> q_barriers;
    RingBarriers<Traits::kStages> dout_barriers;
    // One buffer, but two barriers, as two writers take the steps in turn.
    RingBarriers<Traits::kDqSlots> dq_barriers[Traits::kConsumers];
    RingBarriers<Traits::kStages> ds_barriers;  // all consumers write, and all read
    RingBarriers<Traits::kPieces> piece_barriers[Traits::kConsumers];

    // Each thread arrives for itself: as fast as one for its warp, and its own reads and writes
    // come before its arrival without further proof.
    SPLITKV_DEVICE void init_barriers() {
        constexpr int kConsumerThreads = Traits::kConsumers * kWarpgroupThreads;
        work_barriers.init(kConsumerThreads + kWriters);
        k_barriers.init(kConsumerThreads);
        v_barriers.init(kConsumerThreads);
        q_barriers.init(kConsumerThreads);
        dout_barriers.init(kConsumerThreads);
        ds_barriers.init(kConsumerThreads, kConsumerThreads);
        for (int i = 0; i < Traits::kConsumers; ++i) {
            dq_barriers[i].init(kWarpgroupThreads, 1);
            piece_barriers[i].init(kWarpgroupThreads, 1);
        }
    }
};

// Reads what consumers need of the next item, uniform over the warp; false at the end. The slot
// stays until they release it.
template <typename Smem>
SPLITKV_DEVICE bool read_work(const Smem& smem, const RingCursor<kBackwardItemSlots>& at,
                              KvTileWork* work) {
    smem.work_barriers.wait_full(at);
    const KvTileWork& shared = smem.work[at.stage];
    work->key_begin = uniform(shared.key_begin);
    work->num_steps = uniform(shared.num_steps);
    return work->key_begin >= 0;
}

// The place of an item in a ring of one stage, as that of v or of a piece, by its place in that of
// k: one cursor for both, as registers are scarce.
template <int kKeyStages>
SPLITKV_DEVICE RingCursor<1> place_of_item(const RingCursor<kKeyStages>& at_k) {
    static_assert(kKeyStages <= 2, "the stage of two alternates as the parity of one does");
    return {0, kKeyStages == 1 ? at_k.parity : static_cast<uint32_t>(at_k.stage)};
}

// Where a box of 32 columns of a piece of dv or dk is staged.
template <typename Traits>
SPLITKV_DEVICE uint32_t piece_box_address(const BackwardSmem<Traits>& smem, int consumer, int piece,
                                          int box) {
    if (piece == Traits::kDsPiece) {
        // A consumer's part of a stage of ds: 64 or 128 rows of 128 bytes, one box or two.
        constexpr int kBoxes = Traits::kRows * kRowBytes / kBoxBytes;
        return ptx::smem_address(smem.ds[box / kBoxes]) +
               (consumer * kBoxes + box % kBoxes) * kBoxBytes;
    }
    const uint8_t* buffer = piece == Traits::kDqPiece ? smem.dq[consumer] : smem.spare[consumer];
    return ptx::smem_address(buffer) + box * kBoxBytes;
}

template <typename Traits>
constexpr int backward_smem_bytes() {
    constexpr int kBytes = static_cast<int>(sizeof(BackwardSmem<Traits>));
    static_assert(kBytes <= kMaxSmemBytes, "more shared memory than a CTA can have");
    return kBytes;
}

}  // namespace splitkv::sm90
