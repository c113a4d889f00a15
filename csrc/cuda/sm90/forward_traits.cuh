// Types, sizes and shared memory of the forward kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/params.h"
#include "cuda/forward_work.h"
#include "cuda/sm90/descriptor.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/tiles.h"

namespace splitkv::sm90 {

inline constexpr int kItemSlots = 2;  // the producer is at most one item ahead

// A row tile for one tile head, as the producer hands it to the consumers.
struct alignas(16) TileWork {
    int32_t row_begin;  // -1: no more work
    int32_t num_rows;
    int32_t key_begin;
    int32_t num_tiles;
    int32_t full_begin;
    int32_t full_end;
    int32_t part_row;
    int32_t first_head;  // query head of the tile's first row
};

struct ForwardKernelParams {
    CUtensorMap q;                   // [Tq, Hq, D], boxes of rows / heads_per_tile x heads_per_tile
    CUtensorMap k;                   // [Tk, Hkv, D], boxes of one key tile
    CUtensorMap v;                   // [Tk, Hkv, Dv]
    const cuda::ForwardItem* items;  // [num_items]
    const int32_t* kv_begin;         // [Tq]
    const int32_t* kv_end;           // [Tq]
    Rows out;                        // [Tq, Hq, Dv], fp32, bf16 or fp16
    Rows lse;                        // [Tq, Hq, 1], fp32
    Rows part_out;                   // [part rows, Hq, Dv], fp32
    Rows part_lse;                   // [part rows, Hq, 1], fp32
    int32_t* counter;                // hands out items beyond the first of each CTA
    int32_t num_items;
    int32_t num_tile_heads;  // times that each item is done
    int32_t heads_per_tile;
    int32_t group;  // query heads of one KV head
    int32_t is_head_major;
    float scale_log2;  // softmax_scale * log2(e)
};

template <typename ElementType, int kDimQk, int kDimV, TileKind kKind>
struct ForwardTraits {
    using Element = ElementType;  // of q, k and v; 16 bits
    static constexpr int kHeadDimQk = kDimQk;
    static constexpr int kHeadDimV = kDimV;
    static constexpr ForwardTile kTile = forward_tile(kDimQk, kDimV, kKind);
    static constexpr int kRows = kTile.rows;
    static constexpr int kKeys = kTile.keys;
    static constexpr int kConsumers = kTile.consumers;
    static constexpr int kStages = kTile.stages;
    static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
    static constexpr int kQkChunks = kDimQk / kChunkColumns;
    static constexpr int kVChunks = kDimV / kChunkColumns;
    static constexpr int kQBytes = kRows * kDimQk * 2;
    static constexpr int kKBytes = kKeys * kDimQk * 2;
    static constexpr int kVBytes = kKeys * kDimV * 2;
    // Each key is read by one CTA: it need not stay in L2, where the partials should.
    static constexpr bool kReadsKeysOnce = kKind == TileKind::kShort;
    // Registers of a producer and a consumer thread; one consumer needs no redistribution.
    static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
    static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;

    static_assert(kTile.keys > 0, "no tile is listed for these head dims");
    static_assert(kRows == kConsumers * kWarpgroupRows, "each consumer owns 64 rows");
    static_assert(kKeys % 16 == 0, "the keys of a tile are K of p . v, in steps of 16");
    static_assert(kDimQk % kChunkColumns == 0 && kDimV % kChunkColumns == 0,
                  "tiles are made of chunks of 64 columns");
    static_assert(kQBytes % kSwizzleBytes == 0 && kKBytes % kSwizzleBytes == 0 &&
                      kVBytes % kSwizzleBytes == 0,
                  "every tile starts on a repeat of the swizzle pattern");
};

template <typename Traits>
struct ForwardSmem {
    alignas(kSwizzleBytes) uint8_t q[Traits::kQBytes];
    alignas(kSwizzleBytes) uint8_t k[Traits::kStages][Traits::kKBytes];
    alignas(kSwizzleBytes) uint8_t v[Traits::kStages][Traits::kVBytes];
    TileWork work[kItemSlots];
    RingBarriers<kItemSlots> work_barriers;
    RingBarriers<1> q_barriers;
    RingBarriers<Traits::kStages> k_barriers;
    RingBarriers<Traits::kStages> v_barriers;
    float never_written;  // target of the stores that only order instructions
};

// Dynamic shared memory starts at any multiple of 16; the tiles need one of 1024.
template <typename Traits>
constexpr int forward_smem_bytes() {
    constexpr int kBytes = static_cast<int>(sizeof(ForwardSmem<Traits>)) + kSwizzleBytes;
    static_assert(kBytes <= kMaxSmemBytes, "more shared memory than a CTA can have");
    return kBytes;
}

}  // namespace splitkv::sm90
