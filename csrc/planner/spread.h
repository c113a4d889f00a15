// Second step of a placement: documents that need several ranks, cut so that all budgets are met.
#pragma once

#include <vector>

#include "planner/pieces.h"

namespace splitkv::planner {

// Part of an item that a rank is to take.
struct Share {
    int64_t rank;
    int64_t tokens;
    int64_t cost;
};

// An item with the ranks that take it; the tokens of the shares sum to those of the item.
struct SplitItem {
    Item item;
    std::vector<Share> shares;
};

// Cost per token of what will be placed beside an item on its ranks: cost / tokens.
struct Company {
    int64_t cost;
    int64_t tokens;  // at least 1
};
constexpr Company kFree = {0, 1};  // costs nothing

// Chooses the fewest ranks that can take an item, those with the most room, and shares it in
// proportion to the room. Room is for the item's tokens and cost, and for company that fills the
// tokens it leaves. Takes the shares off the budgets, whose tokens must suffice.
SplitItem share_out(const Item& item, const Company& company, std::vector<Budget>& budgets);

// Gives each item to the fewest ranks that have tokens left, those with the most, whatever it
// costs.
void fill_up(const std::vector<Item>& items, std::vector<Budget>& budgets,
             std::vector<SplitItem>& split);

struct CutOptions {
    int64_t block_size;                    // cuts fall on its multiples where balance allows
    const std::vector<int64_t>& slack;     // accepted cost beyond a rank's target, for each rank
    const std::vector<int64_t>& overhead;  // what was taken off a rank's budget for rows and runs
};

// Cuts the items, cheapest first, at the keys that meet the shares: each rank takes keys from the
// dear front and from the cheap back of what is left, in the mixture that has its cost. What the
// budgets still hold, or owe, is met by the last item of each rank; they end as what was missed.
void cut_items(const QueryModel& model, std::vector<SplitItem> items, const CutOptions& options,
               std::vector<Budget>& budgets, Placement& placement);

}  // namespace splitkv::planner
