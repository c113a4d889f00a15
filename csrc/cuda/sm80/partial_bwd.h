// Backward of partial attention on sm_80 and later, as the backend sees it.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "cuda/backward_work.h"

namespace splitkv::sm80 {

// The parts of a BackwardWork on the device.
struct BackwardWorkArrays {
    const cuda::BackwardItem* items;
    const cuda::BackwardRowTile* row_tiles;
    const cuda::BackwardSegment* segments;
    const cuda::ForwardItem* dq_items;
    const cuda::MergeRow* dq_rows;
};

// Scratch memory of one call; all pointers into the caller's workspace. Counters start at 0.
struct BackwardWorkspace {
    int32_t* counter;     // one number; hands out work items
    int32_t* part_turns;  // [Hkv, num_splits]
    Rows part_dq;         // [dq.num_part_rows, Hq, D], fp32
    // What the parts of a KV tile add to, fp32: dk and dv themselves or, where these are rounded,
    // [num_splits * tile keys, Hkv, D or Dv].
    Rows dk_sums;
    Rows dv_sums;
};

// The kernels of one dtype of q: bf16 or fp16. Each is instantiated in a file of its own. They
// write every row of dq but those of dq_rows, which sum_split_rows joins.
template <typename Element>
void launch_backward_of(const BackwardParams& params, const BackwardWorkArrays& work,
                        const cuda::BackwardWorkShape& shape, const BackwardWorkspace& workspace);

// target[row] = sum of the row's parts, in their order; both fp32 and contiguous.
void sum_split_rows(const Rows& target, const Rows& parts, const cuda::MergeRow* rows,
                    int64_t num_rows, void* stream);

}  // namespace splitkv::sm80
