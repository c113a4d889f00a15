// Backward of partial attention on sm_90a, as the backend sees it.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "cuda/backward_work.h"

namespace splitkv::sm90 {

// The parts of a BackwardWork on the device.
struct BackwardWorkArrays {
    const cuda::BackwardItem* items;
    const cuda::BackwardRowTile* row_tiles;
    const cuda::BackwardSegment* segments;
};

// Scratch memory of one call; all pointers into the caller's workspace. Counters start at 0.
struct BackwardWorkspace {
    int32_t* counter;     // one number; hands out work items
    int32_t* part_turns;  // [Hkv, num_splits]
    int32_t* dq_turns;    // [tile heads, num_row_tiles]; null unless deterministic
    float* statistics;    // [tile heads, num_row_tiles, 2, rows]: lse in log2, delta
    int32_t* limits;      // [num_row_tiles, rows, 2]: first key and number of keys
    // What the parts of a KV tile add to, fp32: dk and dv themselves or, where these are rounded,
    // [num_splits * tile keys, Hkv, D or Dv].
    Rows dk_sums;
    Rows dv_sums;
};

// Fills statistics and limits. A row that sees no key, or has lse = -inf, gets lse = +inf, so that
// its probabilities are 0 without mask code; so do the places of a tile beyond its last row.
void launch_row_statistics(const BackwardParams& params, const BackwardWorkArrays& work,
                           const cuda::BackwardWorkShape& shape,
                           const BackwardWorkspace& workspace);

// The kernels of one dtype of q: bf16 or fp16. Each is instantiated in a file of its own.
template <typename Element>
void launch_backward_of(const BackwardParams& params, const BackwardWorkArrays& work,
                        const cuda::BackwardWorkShape& shape, const BackwardWorkspace& workspace);

}  // namespace splitkv::sm90
