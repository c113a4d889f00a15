#include "planner/place.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "planner/assign.h"
#include "planner/exchange.h"
#include "planner/level.h"
#include "planner/spread.h"
#include "planner/whole.h"

namespace splitkv::planner {
namespace {

// What a bin may cost beyond its budget, which may be rounded up from less than a pair below.
std::vector<int64_t> slack_of(const std::vector<Budget>& budgets, int64_t tolerance) {
    std::vector<int64_t> slack(budgets.size());
    for (size_t i = 0; i < budgets.size(); ++i) {
        const int64_t cost = std::max<int64_t>(budgets[i].cost, 0);
        const int64_t least = std::max<int64_t>(cost - 1, 0);
        const int64_t limit = least + fraction_of(least, tolerance, kTolerance);
        slack[i] = std::max<int64_t>(limit - cost, 0);
    }
    return slack;
}

// Items to place, and bins (ranks, or nodes of them) of as many tokens.
struct Task {
    const std::vector<Item>& items;
    Company all;  // what the items cost
    std::vector<Budget> budgets;
    std::vector<int64_t> slack;

    // Whether an item costs more a token than all of them do.
    bool is_dense(const Item& item) const {
        return static_cast<__int128>(item.cost) * all.tokens >
               static_cast<__int128>(all.cost) * item.piece.tokens();
    }
};

void add(const Item& item, Company& company) {
    company.cost += item.cost;
    company.tokens += item.piece.tokens();
}

Task make_task(const std::vector<Item>& items, const std::vector<Budget>& budgets,
               int64_t tolerance) {
    Task task = {items, {0, 0}, budgets, slack_of(budgets, tolerance)};
    for (const Item& item : items) add(item, task.all);
    return task;
}

// The items that are not dense.
Company sparse_items(const Task& task) {
    Company sparse = {0, 0};
    for (const Item& item : task.items) {
        if (!task.is_dense(item)) add(item, sparse);
    }
    return sparse;
}

// Indices of the long items: no bin can hold one, and company that fills the tokens it leaves.
std::vector<size_t> long_items(const Task& task, const Company& company) {
    Budget largest = {0, 0};
    for (size_t i = 0; i < task.budgets.size(); ++i) {
        largest.tokens = std::max(largest.tokens, task.budgets[i].tokens);
        largest.cost = std::max(largest.cost, task.budgets[i].cost + task.slack[i]);
    }
    std::vector<size_t> found;
    for (size_t i = 0; i < task.items.size(); ++i) {
        const __int128 tokens_left = largest.tokens - task.items[i].piece.tokens();
        const __int128 cost_left = largest.cost - task.items[i].cost;
        if (tokens_left < 0 || cost_left * company.tokens < tokens_left * company.cost) {
            found.push_back(i);
        }
    }
    return found;
}

// The three steps. Long items choose their ranks in the order given, dense ones with room for
// company.
Placement place(const QueryModel& model, const Task& task, const std::vector<size_t>& order,
                const Company& company, const PlaceOptions& options) {
    std::vector<Budget> budgets = task.budgets;
    Placement placement(budgets.size());
    std::vector<bool> is_long(task.items.size(), false);
    std::vector<SplitItem> split;
    for (const size_t i : order) {
        is_long[i] = true;
        const Company& beside = task.is_dense(task.items[i]) ? company : kFree;
        split.push_back(share_out(task.items[i], beside, budgets));
    }
    const std::vector<Item> left = place_whole(task.items, is_long, task.slack, budgets, placement);
    fill_up(left, budgets, split);
    cut_items(model, std::move(split), {options.block_size, task.slack, options.overhead}, budgets,
              placement);
    level(model, task.slack, budgets, placement);
    return placement;
}

// What a placement misses of the balance, and rows that its bins attend with.
struct Score {
    __int128 excess;
    __int128 rows;
    bool operator<(const Score& other) const {
        return std::tie(excess, rows) < std::tie(other.excess, other.rows);
    }
};

Score score(const QueryModel& model, const Task& task, const Placement& placement) {
    Score found = {0, 0};
    std::vector<Run> runs;
    runs.reserve(2 * task.items.size());
    for (size_t bin = 0; bin < placement.size(); ++bin) {
        int64_t cost = 0;
        for (const Piece& piece : placement[bin]) {
            cost += model.pairs_in(piece.doc, {piece.begin, piece.end});
            runs.push_back({static_cast<int64_t>(bin), piece.doc, piece.begin, piece.end});
        }
        const int64_t excess = cost - task.budgets[bin].cost - task.slack[bin];
        found.excess = std::max<__int128>(found.excess, excess);
    }
    for (const auto& ranges : needed_rows(model, runs, static_cast<int64_t>(placement.size()))) {
        for (const Range& rows : ranges) found.rows += rows.end - rows.begin;
    }
    return found;
}

}  // namespace

Placement place_items(const QueryModel& model, const std::vector<Item>& items,
                      const std::vector<Budget>& budgets, const PlaceOptions& options) {
    const Task task = make_task(items, budgets, options.tolerance);
    // The dearest first, with room for those below the mean density.
    const Company sparse = sparse_items(task);
    const std::vector<size_t> dense = long_items(task, sparse);
    Placement by_density = place(model, task, dense, sparse, options);
    if (dense.empty() || items.size() == 1) return by_density;
    // The shortest first, each on the fewest ranks that can take it.
    std::vector<size_t> too_long = long_items(task, kFree);
    std::reverse(too_long.begin(), too_long.end());
    Placement by_length = place(model, task, too_long, kFree, options);
    const bool is_first_better = score(model, task, by_density) < score(model, task, by_length);
    return is_first_better ? std::move(by_density) : std::move(by_length);
}

}  // namespace splitkv::planner
