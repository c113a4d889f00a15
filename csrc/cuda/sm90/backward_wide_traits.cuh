// Types, sizes and shared memory of the backward kernel for wide head dims.
#pragma once

#include "cuda/sm90/backward_traits.cuh"

namespace splitkv::sm90 {

template <typename ElementType, int kDimQk, int kDimV>
struct BackwardWideTraits {
    using Element = ElementType;  // of q, k, v and dout; 16 bits
    static constexpr int kHeadDimQk = kDimQk;
    static constexpr int kHeadDimV = kDimV;
    static constexpr BackwardTile kTile = backward_tile(kDimQk, kDimV);
    static constexpr int kRows = kTile.rows;
    static constexpr int kKeys = kTile.keys;
    static constexpr int kConsumers = kTile.consumers;  // beside the one that computes scores
    static constexpr int kStages = kTile.q_stages;
    static constexpr int kDoutStages = kTile.dout_stages;
    static constexpr int kKeyStages = 1;
    static constexpr int kThreads = (kConsumers + 2) * kWarpgroupThreads;
    static constexpr int kQkChunks = kDimQk / kChunkColumns;
    static constexpr int kVChunks = kDimV / kChunkColumns;
    static constexpr int kQBytes = kRows * kDimQk * 2;
    static constexpr int kDoutBytes = kRows * kDimV * 2;
    static constexpr int kKBytes = kKeys * kDimQk * 2;
    static constexpr int kVBytes = kKeys * kDimV * 2;
    static constexpr int kStatisticsBytes = kRows * 2 * 4;
    static constexpr int kLimitsBytes = kRows * 2 * 4;
    // Scores are computed, and handed over, in blocks of 64 keys: [64 rows, 64 keys].
    static constexpr int kKeyBlocks = kKeys / kChunkColumns;
    static constexpr int kBlockBytes = kRows * kChunkColumns * 2;
    static constexpr int kPSlots = 2;
    static constexpr int kDsSlots = 2 * kKeyBlocks;  // of two steps
    // dk and dv: a consumer owns a block of keys, or half of the columns of the only block.
    static constexpr bool kSplitsKeys = kKeyBlocks == kConsumers;
    static constexpr int kDkColumns = kSplitsKeys ? kDimQk : kDimQk / kConsumers;
    static constexpr int kDvColumns = kSplitsKeys ? kDimV : kDimV / kConsumers;
    // dq: half of the columns of all rows. All gradients of a consumer leave in pieces, as wide as
    // one product of dq, by way of one buffer.
    static constexpr bool kSplitsDqRows = false;
    static constexpr int kDqColumns = kDimQk / kConsumers;
    static constexpr int kPieceColumns =
        kDqColumns % kChunkColumns == 0 ? kChunkColumns : kBoxColumns;
    static constexpr int kDqPieces = kDqColumns / kPieceColumns;
    static constexpr int kDqSlots = kWriters * kDqPieces;
    static constexpr int kDqBoxes = kPieceColumns / kBoxColumns;  // of one piece
    static constexpr int kPieceBytes = kDqBoxes * kBoxBytes;
    static constexpr int kDvPieces = kDvColumns / kPieceColumns;
    static constexpr int kPieces = kDvPieces + kDkColumns / kPieceColumns;
    static constexpr bool kHasOneBuffer = true;
    // 512 for one thread of each warpgroup. Where a consumer leaves fewer, ds is computed from p in
    // 16 bits, read back from its slot.
    static constexpr bool kKeepsP = !kSplitsKeys;
    static constexpr int kProducerRegisters = 32;
    static constexpr int kScoreRegisters = kKeepsP ? 96 : 64;
    static constexpr int kConsumerRegisters = kKeepsP ? 192 : 208;

    static_assert(kTile.keys > 0 && kTile.is_wide, "no such tile is listed for these head dims");
    static_assert(kConsumers == 2 && kRows == kWarpgroupRows, "work is divided among two");
    static_assert(kSplitsKeys || kKeyBlocks == 1, "keys or columns go to the consumers");
    static_assert(kPSlots % kKeyBlocks == 0, "a step begins at slot 0 or takes one slot");
    static_assert((kDkColumns % kChunkColumns == 0 && kDvColumns % kChunkColumns == 0),
                  "a consumer's dk and dv take whole chunks of q and dout");
    static_assert(kDqPieces > 1 && kDqPieces * kPieceColumns == kDqColumns,
                  "dq is computed in equal pieces");
    static_assert(kProducerRegisters + kScoreRegisters + kConsumers * kConsumerRegisters <= 512,
                  "an SM has 65536 registers");
};

template <typename Element, int kDimQk, int kDimV>
struct BackwardSmem<BackwardWideTraits<Element, kDimQk, kDimV>> {
    using Traits = BackwardWideTraits<Element, kDimQk, kDimV>;
    alignas(kSwizzleBytes) uint8_t k[Traits::kKeyStages][Traits::kKBytes];
    alignas(kSwizzleBytes) uint8_t v[Traits::kVBytes];
    alignas(kSwizzleBytes) uint8_t q[Traits::kStages][Traits::kQBytes];
    alignas(kSwizzleBytes) uint8_t dout[Traits::kDoutStages][Traits::kDoutBytes];
    alignas(kSwizzleBytes) uint8_t p[Traits::kPSlots][Traits::kBlockBytes];
    alignas(kSwizzleBytes) uint8_t ds[Traits::kDsSlots][Traits::kBlockBytes];
    alignas(kSwizzleBytes) uint8_t dq[Traits::kConsumers][Traits::kPieceBytes];
    alignas(16) float statistics[Traits::kStages][2][Traits::kRows];
    alignas(16) int32_t limits[Traits::kStages][Traits::kRows][2];
    int32_t is_masked[Traits::kStages];
    KvTileWork work[kBackwardItemSlots];
    RingBarriers<kBackwardItemSlots> work_barriers;
    RingBarriers<Traits::kKeyStages> k_barriers;
    RingBarriers<1> v_barriers;
    RingBarriers<Traits::kStages> q_barriers;
    RingBarriers<Traits::kDoutStages> dout_barriers;
    RingBarriers<Traits::kPSlots> p_barriers;
    RingBarriers<Traits::kDsSlots> ds_barriers;
    // One buffer, but a barrier for each piece, as two writers take the steps in turn.
    RingBarriers<Traits::kDqSlots> dq_barriers[Traits::kConsumers];
    RingBarriers<Traits::kPieces> piece_barriers[Traits::kConsumers];

    // Each thread arrives for itself.
    SPLITKV_DEVICE void init_barriers() {
        constexpr int kConsumerThreads = Traits::kConsumers * kWarpgroupThreads;
        constexpr int kAllThreads = kConsumerThreads + kWarpgroupThreads;
        work_barriers.init(kAllThreads + kWriters);
        k_barriers.init(kAllThreads);
        v_barriers.init(kWarpgroupThreads);
        q_barriers.init(kAllThreads);
        dout_barriers.init(kAllThreads);
        p_barriers.init(kWarpgroupThreads,
                        Traits::kSplitsKeys ? kWarpgroupThreads : kConsumerThreads);
        ds_barriers.init(kWarpgroupThreads, kConsumerThreads);
        for (int i = 0; i < Traits::kConsumers; ++i) {
            dq_barriers[i].init(kWarpgroupThreads, 1);
            piece_barriers[i].init(kWarpgroupThreads, 1);
        }
    }
};

// Where a box of 32 columns of a piece of dv or dk is staged.
template <typename Element, int kDimQk, int kDimV>
SPLITKV_DEVICE uint32_t
piece_box_address(const BackwardSmem<BackwardWideTraits<Element, kDimQk, kDimV>>& smem,
                  int consumer, int /*piece*/, int box) {
    return ptx::smem_address(smem.dq[consumer]) + box * kBoxBytes;
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

}  // namespace splitkv::sm90
