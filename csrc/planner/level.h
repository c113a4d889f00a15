// Third step of a placement, a repair that only improves: swaps between a dear and a cheap rank.
#pragma once

#include <vector>

#include "planner/pieces.h"

namespace splitkv::planner {

// While a rank exceeds its budget by more than `slack`, swaps equally many keys between the rank
// that is farthest above its budget and the one farthest below: keys from the dear front of a
// piece against keys from the cheap back of another. Among the swaps that level one of the two, or
// bring the lower one to half its slack above, the one that makes the fewest rows travel is taken.
// Ends after a few swaps a rank, or where none helps. `budgets` holds what each rank was to cost
// beyond what it does, and is kept up to date.
void level(const QueryModel& model, const std::vector<int64_t>& slack, std::vector<Budget>& budgets,
           Placement& placement);

}  // namespace splitkv::planner
