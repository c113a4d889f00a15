// The work list of a backward: what each CTA does, made once per microbatch on the host and reused
// by every layer that has the same mask and head counts. Host code, no CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/forward_work.h"
#include "cuda/sm90/tiles.h"

namespace splitkv::cuda {

// One KV tile against the row tiles of its segments; done once for each KV head, for all query
// heads of the group. A tile whose rows are many for the number of tiles is split into parts, which
// add to dk and dv in turn.
struct BackwardItem {
    int32_t kv_tile;  // covers keys [kv_tile * keys, + keys)
    int32_t segment_begin;
    int32_t num_segments;
    int32_t num_steps;  // row tiles of all segments
    int32_t part;
    int32_t num_parts;
    int32_t split;  // which of the split KV tiles this is; 0 where num_parts is 1
    int32_t unused;
};
static_assert(sizeof(BackwardItem) == 32, "two 16-byte loads, and 8 int32 of the op's tensor");

// Row tiles [first_tile, + num_tiles), alike in whether they need mask code for the KV tile.
struct BackwardSegment {
    int32_t first_tile;
    int32_t num_tiles;
    int32_t is_masked;
    int32_t unused;
};
static_assert(sizeof(BackwardSegment) == 16, "one 16-byte load");

// Consecutive query rows, of one head or of all heads of a group.
struct BackwardRowTile {
    int32_t row_begin;
    int32_t num_rows;
    int32_t first_kv_tile;  // lowest of the consecutive KV tiles that visit it
    int32_t unused;
};
static_assert(sizeof(BackwardRowTile) == 16, "one 16-byte load");

// Sizes of a work list, and of the call that it was made for. Passed to the op as int[].
struct BackwardWorkShape {
    int64_t num_rows;
    int64_t num_keys;
    int64_t num_heads_q;
    int64_t num_heads_kv;
    int64_t head_dim_qk;
    int64_t head_dim_v;
    int64_t family;  // Family
    // Of the second list, which the sm_80 kernel for dq walks over; 0 for sm_90.
    int64_t dq_heads_per_tile;
    int64_t num_dq_items;
    int64_t is_dq_head_major;
    int64_t num_dq_merge_rows;
    int64_t num_dq_part_rows;
    // Of the first list.
    int64_t heads_per_tile;  // query heads that share a row tile: 1, or the whole group
    int64_t num_items;
    int64_t num_row_tiles;
    int64_t num_segments;
    int64_t num_unseen_kv_tiles;
    int64_t prefetches_dq;     // to L2, as few KV tiles visit a row tile
    int64_t num_splits;        // KV tiles that are split into parts
    int64_t is_head_major;     // order of (item, head): head outermost, else head innermost
    int64_t is_deterministic;  // dq is summed in the order of the KV tiles
};

struct BackwardWork {
    std::vector<BackwardItem> items;  // in the order in which they are handed out
    std::vector<BackwardRowTile> row_tiles;
    std::vector<BackwardSegment> segments;
    std::vector<ForwardItem> dq_items;     // sm_80 alone: for dq, which is then not added to
    std::vector<MergeRow> dq_merge_rows;   // sm_80 alone: rows of dq that are sums of parts
    std::vector<int32_t> unseen_kv_tiles;  // that have no item; late, as they are not aligned
    std::vector<int32_t> split_kv_tiles;   // the KV tile of each split; [num_splits]
    BackwardWorkShape shape;
};

struct BackwardWorkRequest {
    const int32_t* kv_begin;  // [num_rows], on the host
    const int32_t* kv_end;    // [num_rows]
    int64_t num_rows;
    int64_t num_keys;
    int64_t num_heads_q;
    int64_t num_heads_kv;
    int64_t head_dim_qk;
    int64_t head_dim_v;
    int32_t num_sms;
    Family family;
    bool is_deterministic;
};

// Throws std::invalid_argument when an interval leaves [0, num_keys) or there is no kernel for the
// head dims. One pass over the rows for each packing that is tried; then work for each place where
// a KV tile's need of a row tile changes, not for each pair of tiles.
BackwardWork build_backward_work(const BackwardWorkRequest& request);

}  // namespace splitkv::cuda
