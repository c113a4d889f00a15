// Forward of partial attention on sm_90a, as the backend sees it.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "cuda/forward_work.h"

namespace splitkv::sm90 {

// Scratch memory of one call; all pointers into the caller's workspace.
struct ForwardWorkspace {
    Rows part_out;     // [num_part_rows, Hq, Dv], fp32
    Rows part_lse;     // [num_part_rows, Hq, 1], fp32
    int32_t* counter;  // one number; hands out work items
};

// The kernels of one dtype of q: bf16 or fp16. Each is instantiated in a file of its own.
template <typename Element>
void launch_forward_of(const ForwardParams& params, const cuda::ForwardItem* items,
                       const cuda::ForwardWorkShape& shape, const ForwardWorkspace& workspace);

}  // namespace splitkv::sm90
