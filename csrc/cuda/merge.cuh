// Joining partials by their log-sum-exp: the kernel behind merge_partials_ and behind a forward
// whose keys were split over CTAs.
//
// Each thread owns 16 bytes of a row's head and walks over its partials in their order, several in
// flight at once, keeping the weighted sum relative to the largest lse so far. Threads of a head
// repeat the few scalar steps instead of sharing them: nothing waits for anything but memory. Every
// partial is read once, the result is written once, and not where there is no partial.
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
    Rows out;         // [T, H, Dv]
    Rows lse;         // [T, H, 1], fp32
    Rows part_out;    // [R, H, Dv]
    Rows part_lse;    // [R, H, 1], fp32
    Rows part_scale;  // [R, H, 1], fp32, factor of part_out; data is nullptr for 1
    Slots slots;
    int64_t num_rows;  // rows to merge
    bool accumulates;  // out and lse hold a running result; never with StridedSlots
};

// Joins the split rows of a forward: overwrites out and lse of the rows named by `rows`.
void merge_split_rows(const Rows& out, const Rows& lse, const Rows& part_out, const Rows& part_lse,
                      const MergeRow* rows, int64_t num_rows, void* stream);

}  // namespace splitkv::cuda
