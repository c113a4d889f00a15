// What a thread knows of the rows that it holds in accumulators, and the masks of scores.
//
// Of each 16 rows a thread holds `lane / 4` and the one 8 below, and of each row the columns
// 8 j + 2 (lane % 4) and the next one, in registers 4 j + 2 row and 4 j + 2 row + 1.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/forward_work.h"
#include "cuda/sm80/smem_tile.cuh"

namespace splitkv::sm80 {

inline constexpr int kRowsPerThread = 2;  // of each 16
inline constexpr unsigned kAllLanes = 0xffffffffu;

SPLITKV_DEVICE int first_row_of_lane() { return lane() / 4; }
SPLITKV_DEVICE int first_column_of_lane() { return 2 * (lane() % 4); }

// An item for one tile head.
struct TileWork {
    cuda::ForwardItem item;
    int first_head;  // query head of the tile's first row
    int kv_head;
};

// Item and head of a CTA: dearest items first, as CTAs start in the order of their index.
SPLITKV_DEVICE TileWork tile_work(const cuda::ForwardItem* items, int num_items, int num_tile_heads,
                                  bool is_head_major, int heads_per_tile, int group) {
    const int index = static_cast<int>(blockIdx.x);
    const int head = is_head_major ? index / num_items : index % num_tile_heads;
    TileWork work;
    work.item = items[is_head_major ? index % num_items : index / num_tile_heads];
    work.first_head = head * heads_per_tile;
    work.kv_head = work.first_head / group;
    return work;
}

// Where row m of a tile comes from.
struct TileRow {
    int32_t row;  // query row, counted from the item's first
    int32_t head;
    bool is_valid;
};

SPLITKV_DEVICE TileRow tile_row(const TileWork& work, int heads_per_tile, int m) {
    TileRow at;
    at.row = m / heads_per_tile;
    at.head = work.first_head + m % heads_per_tile;
    at.is_valid = at.row < work.item.num_rows;
    return at;
}

// The keys that a row sees. Those of a tile lie in shared memory, where only masks read them:
// registers are what the kernels lack most.
struct RowKeys {
    int32_t begin;
    uint32_t length;  // 0 for a row that sees no key
};

// Fills keys[0 .. num_rows), one thread for each row of the tile; a barrier must follow.
SPLITKV_DEVICE void load_row_keys(const TileWork& work, int heads_per_tile, int num_rows,
                                  const int32_t* kv_begin, const int32_t* kv_end, RowKeys* keys) {
    for (int m = static_cast<int>(threadIdx.x); m < num_rows; m += static_cast<int>(blockDim.x)) {
        const TileRow at = tile_row(work, heads_per_tile, m);
        RowKeys seen{0, 0};
        if (at.is_valid) {
            const int32_t begin = __ldg(kv_begin + work.item.row_begin + at.row);
            const int32_t end = __ldg(kv_end + work.item.row_begin + at.row);
            seen = {begin, begin < end ? static_cast<uint32_t>(end - begin) : 0u};
        }
        keys[m] = seen;
    }
}

// Sets scores of hidden keys to -inf in the 16 rows from keys[0] on; first_key is that of column 0.
template <int kRegisters>
SPLITKV_DEVICE void mask_scores(const RowKeys* keys, int first_key, float (&s)[kRegisters]) {
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
        const RowKeys seen = keys[first_row_of_lane() + 8 * row];
        const int offset = first_key + first_column_of_lane() - seen.begin;
#pragma unroll
        for (int j = 0; j < kRegisters / 4; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                // One unsigned comparison for both ends of the interval.
                if (static_cast<uint32_t>(offset + 8 * j + e) >= seen.length) {
                    s[4 * j + 2 * row + e] = -INFINITY;
                }
            }
        }
    }
}

}  // namespace splitkv::sm80
