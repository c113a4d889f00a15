// First step of a placement: documents that stay whole on one rank, dearest first.
#pragma once

#include <cstddef>
#include <vector>

#include "planner/pieces.h"

namespace splitkv::planner {

// Places items that are not long whole, in the order given (dearest first), each on the rank whose
// remaining budget is densest in cost per token: longest-processing-time-first for two budgets at
// once. An item must fit the tokens, and the cost within `slack`; what fits no rank is returned, in
// order. Ties go to the lower rank. Takes what it places off the budgets.
std::vector<Item> place_whole(const std::vector<Item>& items, const std::vector<bool>& is_long,
                              const std::vector<int64_t>& slack, std::vector<Budget>& budgets,
                              Placement& placement);

}  // namespace splitkv::planner
