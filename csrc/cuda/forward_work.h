// The work list of a forward: what each CTA does, made once per microbatch on the host and reused
// by every layer that has the same mask and head counts. Host code, no CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/family.h"
#include "cuda/sm90/tiles.h"

namespace splitkv::cuda {

// One row tile against a run of key tiles; done once for each head (see ForwardWorkShape).
// Key tile i covers keys [key_begin + i * keys, + keys); those in [full_begin, full_end) are seen
// whole by every row that sees any key. No tiles: the rows are empty and only get written.
struct ForwardItem {
    int32_t row_begin;
    int32_t num_rows;
    int32_t key_begin;
    int32_t num_tiles;
    int32_t full_begin;
    int32_t full_end;
    int32_t part_row;  // -1: writes the result; else the first of its num_rows rows of partials
    int32_t unused;
};
static_assert(sizeof(ForwardItem) == 32, "one 32-byte load, and 8 int32 of the op's tensor");

// Joins the partials of one query row: part rows first_part + i * stride.
struct MergeRow {
    int32_t row;
    int32_t first_part;
    int32_t num_parts;
    int32_t stride;
};
static_assert(sizeof(MergeRow) == 16, "one 16-byte load");

// Sizes of a work list, and of the call that it was made for. Passed to the op as int[].
struct ForwardWorkShape {
    int64_t num_rows;
    int64_t num_keys;
    int64_t num_heads_q;
    int64_t num_heads_kv;
    int64_t head_dim_qk;
    int64_t head_dim_v;
    int64_t family;          // Family
    int64_t kind;            // sm90::TileKind; kEdge for sm_80
    int64_t heads_per_tile;  // query heads that share a tile's rows: 1, or the whole group
    int64_t num_items;
    int64_t is_head_major;  // order of (item, head): head outermost, else head innermost
    int64_t num_merge_rows;
    int64_t num_part_rows;
};

struct ForwardWork {
    std::vector<ForwardItem> items;  // dearest first
    std::vector<MergeRow> merge_rows;
    ForwardWorkShape shape;
};

enum class RowWalk : int32_t {
    kForward = 0,
    kDq = 1,  // the sm_80 kernel that computes dq walks over keys like a forward
};

struct ForwardWorkRequest {
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
    RowWalk walk;
};

// Throws std::invalid_argument when an interval leaves [0, num_keys) or there is no kernel for the
// head dims. One pass over the rows for each packing that is tried, then work per tile.
ForwardWork build_forward_work(const ForwardWorkRequest& request);

}  // namespace splitkv::cuda
