// Forward of partial attention on sm_80 and later, as the backend sees it.
#pragma once

#include "attention/params.h"
#include "cuda/forward_work.h"

namespace splitkv::sm80 {

// Where the parts of split rows go; both point into the caller's workspace.
struct ForwardParts {
    Rows out;  // [num_part_rows, Hq, Dv], fp32
    Rows lse;  // [num_part_rows, Hq, 1], fp32
};

// The kernels of one dtype of q: bf16 or fp16. Each is instantiated in a file of its own.
template <typename Element>
void launch_forward_of(const ForwardParams& params, const cuda::ForwardItem* items,
                       const cuda::ForwardWorkShape& shape, const ForwardParts& parts);

}  // namespace splitkv::sm80
