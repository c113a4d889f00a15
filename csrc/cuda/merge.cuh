// Joining partials by their log-sum-exp: the kernel behind merge_partials_ and behind a forward
// whose keys were split over CTAs.
//
// One warp per (row, head). Pass 1: lanes read the partials' lse, one each, and agree on maximum
// and sum. Pass 2: each lane owns 4 columns and adds up weight * out in the order of the partials,
// a few loads in flight at once. Every partial is read once, the result is written once.
#pragma once

#include "attention/params.h"
#include "cuda/forward_work.h"

namespace splitkv::cuda {

// Which partials a row merges. MergeParams' CSR, or runs of equal stride (forward work lists).
struct CsrSlots {
    const int32_t* ptr;    // [T + 1]
    const int32_t* slots;  // [ptr[T]]
};

struct StridedSlots {
    const MergeRow* rows;  // [num_rows]
};

template <typename Slots>
struct MergeKernelParams {
    Rows out;       // [T, H, Dv]
    Rows lse;       // [T, H, 1], fp32
    Rows part_out;  // [R, H, Dv]
    Rows part_lse;  // [R, H, 1], fp32
    Slots slots;
    int64_t num_rows;      // rows to merge
    int32_t heads_in_cta;  // heads of a group
    int32_t num_groups;
};

// Joins the split rows of a forward: overwrites out and lse of the rows named by `rows`.
void merge_split_rows(const Rows& out, const Rows& lse, const Rows& part_out, const Rows& part_lse,
                      const MergeRow* rows, int64_t num_rows, void* stream);

}  // namespace splitkv::cuda
