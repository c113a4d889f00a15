// Types, sizes and shared memory of the kernel for dk and dv.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "cuda/sm80/dq_kernel.cuh"

namespace splitkv::sm80 {

struct DkvKernelParams {
    Rows dout;                               // [Tq, Hq, Dv], dtype of q
    Rows q;                                  // [Tq, Hq, D]
    Rows k;                                  // [Tk, Hkv, D]
    Rows v;                                  // [Tk, Hkv, Dv]
    Rows lse;                                // [Tq, Hq, 1], fp32
    Rows delta;                              // [Tq, Hq, 1], fp32
    Rows dk;                                 // [Tk, Hkv, D], fp32 or dtype of q
    Rows dv;                                 // [Tk, Hkv, Dv], dtype of dk
    Rows dk_sums;                            // [.., Hkv, D], fp32, added to; see partial_bwd.h
    Rows dv_sums;                            // [.., Hkv, Dv], fp32, added to
    const int32_t* kv_begin;                 // [Tq]
    const int32_t* kv_end;                   // [Tq]
    const cuda::BackwardItem* items;         // [num_items]
    const cuda::BackwardRowTile* row_tiles;  // [num_row_tiles]
    const cuda::BackwardSegment* segments;   // [num_segments]
    int32_t* counter;                        // hands out (item, head) in order
    int32_t* part_turns;                     // [Hkv, num_splits]
    int32_t num_items;
    int32_t num_splits;
    int32_t heads_per_tile;
    int32_t group;  // query heads of one KV head
    int32_t is_head_major;
    int32_t accumulates;  // into dk and dv; else they are overwritten
    int32_t rounds;       // dk and dv to 16 bits; those of split KV tiles are summed in fp32 first
    float softmax_scale;
    float scale_log2;  // softmax_scale * log2(e)
};

template <typename ElementType, int kDimQk, int kDimV>
struct DkvTraits {
    using Element = ElementType;  // of q, k, v and dout; 16 bits
    static constexpr int kHeadDimQk = kDimQk;
    static constexpr int kHeadDimV = kDimV;
    static constexpr KeyTileSize kTile = backward_tile(kDimQk, kDimV);
    static constexpr int kRows = kTile.rows;
    static constexpr int kKeys = kTile.keys;
    static constexpr int kKeyGroups = kKeys / kMmaRows;
    static constexpr int kThreads = kKeyGroups * kTile.column_parts * kWarpThreads;
    static constexpr int kDkColumns = kDimQk / kTile.column_parts;  // of one warp
    static constexpr int kDvColumns = kDimV / kTile.column_parts;

    static_assert(kDkColumns % kChunkColumns == 0 && kDvColumns % kChunkColumns == 0,
                  "warps own whole chunks of columns");
    static_assert(kRows * 4 <= kThreads, "each thread copies at most one value of a step's rows");
};

// Values of the rows of one step, as they lie in memory; zeros beyond the last row, which make it
// one that sees no key.
template <typename Traits>
struct StepRows {
    alignas(16) float lse[Traits::kRows];
    float delta[Traits::kRows];
    int32_t begin[Traits::kRows];
    int32_t end[Traits::kRows];
};

template <typename Traits>
struct DkvSmem {
    alignas(kChunkRowBytes) uint8_t k[tile_bytes(Traits::kKeys, Traits::kHeadDimQk)];
    alignas(kChunkRowBytes) uint8_t v[tile_bytes(Traits::kKeys, Traits::kHeadDimV)];
    alignas(kChunkRowBytes) uint8_t q[kStages][tile_bytes(Traits::kRows, Traits::kHeadDimQk)];
    alignas(kChunkRowBytes) uint8_t dout[kStages][tile_bytes(Traits::kRows, Traits::kHeadDimV)];
    StepRows<Traits> rows[kStages];
    int32_t ticket;
};

}  // namespace splitkv::sm80
