// Items onto bins: documents that fit stay whole, the others are cut, and swaps level what is left.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/pieces.h"

namespace splitkv::planner {

struct PlaceOptions {
    int64_t block_size;  // documents are cut at its multiples where balance allows
    int64_t tolerance;   // accepted share of a bin's cost beyond its budget, of 1 / kTolerance
    std::vector<int64_t> overhead;  // what was taken off each bin's budget for rows and runs
};

// Places items, given the dearest first, on bins (ranks, or nodes of them) whose tokens sum to
// theirs. Documents that no bin can hold well choose their ranks in two orders; the placement that
// is within tolerance wins, or that makes fewer query rows travel.
Placement place_items(const QueryModel& model, const std::vector<Item>& items,
                      const std::vector<Budget>& budgets, const PlaceOptions& options);

}  // namespace splitkv::planner
