// How the steps of each KV tile of a backward are divided among items. Host code, no CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/backward_work.h"
#include "cuda/row_tiles.h"

namespace splitkv::cuda {

// One way to cut the rows: the tile sizes, the heads that share a tile, and the tiles.
struct BackwardCut {
    int32_t tile_rows;
    int32_t tile_keys;
    int64_t heads_per_tile;
    int64_t tile_heads_per_kv_head;
    std::vector<RowTile> tiles;
    int64_t total_cost;  // steps, over all heads
};

// The row tiles that see one KV tile, as runs. A step is one row tile.
using BackwardSegments = std::vector<BackwardSegment>;

// Steps [first_step, last_step) of a KV tile. The parts of a band, of all KV tiles, are handed out
// before those of the next.
struct BackwardPart {
    int32_t band;
    int64_t first_step;
    int64_t last_step;
};

struct BackwardParts {
    std::vector<std::vector<BackwardPart>> of_kv_tile;  // in the order in which they add
    int32_t num_bands;                                  // 1: parts are not made by bands
    // By bands alone: the order of heads, and the steps by which each KV tile of a band starts
    // later than the one before, going around: the first brings the rows, the others find them.
    bool is_head_major;
    int64_t stagger;
};

int64_t num_steps_of(const BackwardSegments& segments);

// Divides the steps of each KV tile, whose row tiles are its `segments`; one without steps gets no
// part. `num_steps` are those of the KV tiles that have any.
BackwardParts divide_steps(const BackwardWorkRequest& request, const BackwardCut& cut,
                           const std::vector<BackwardSegments>& segments,
                           const std::vector<int64_t>& num_steps);

// Whether few of the KV tiles with `num_steps` steps visit a row tile.
bool has_few_visits(const std::vector<int64_t>& num_steps, int64_t num_row_tiles);

// Bytes that a step reads and adds to for each query row of one head: q, dout, and dq in fp32.
int64_t bytes_of_row(const BackwardWorkRequest& request);

}  // namespace splitkv::cuda
