#include "planner/place.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "planner/assign.h"
#include "planner/exchange.h"
#include "planner/level.h"
#include "planner/sort.h"
#include "planner/spread.h"
#include "planner/whole.h"

namespace splitkv::planner {
namespace {

std::vector<int64_t> slack_of(const std::vector<Budget>& budgets, int64_t tolerance) {
    std::vector<int64_t> slack(budgets.size());
    for (size_t i = 0; i < budgets.size(); ++i) {
        slack[i] = fraction_of(std::max<int64_t>(budgets[i].cost, 0), tolerance, kTolerance);
    }
    return slack;
}

// Items to place, the dearest first, and bins (ranks, or nodes of them) of as many tokens.
struct Task {
    std::vector<Item> items;
    size_t num_long;  // of the items: those that fit no bin
    Company all;      // what all items cost
    Company others;   // what the other items cost
    std::vector<Budget> budgets;
    std::vector<int64_t> slack;

    // Whether an item costs more a token than all of them do.
    bool is_dense(const Item& item) const {
        return static_cast<__int128>(item.cost) * all.tokens >
               static_cast<__int128>(all.cost) * item.piece.tokens();
    }
};

std::vector<Item> dearest_first(const std::vector<Item>& items) {
    int64_t dearest = 0;
    for (const Item& item : items) dearest = std::max(dearest, item.cost);
    std::vector<Keyed> order(items.size());
    for (size_t i = 0; i < items.size(); ++i) order[i] = {dearest - items[i].cost, i};
    sort_by_key(order);
    std::vector<Item> sorted;
    sorted.reserve(items.size());
    for (const auto& [cost, i] : order) sorted.push_back(items[i]);
    return sorted;
}

Company company_of(std::vector<Item>::const_iterator item, std::vector<Item>::const_iterator end) {
    Company company = {0, 0};
    for (; item != end; ++item) {
        company.cost += item->cost;
        company.tokens += item->piece.tokens();
    }
    return company;
}

Task make_task(const std::vector<Item>& unsorted, std::vector<Budget> budgets, int64_t tolerance) {
    std::vector<Item> items = dearest_first(unsorted);
    std::vector<int64_t> slack = slack_of(budgets, tolerance);
    Budget largest = {0, 0};
    for (size_t i = 0; i < budgets.size(); ++i) {
        largest.tokens = std::max(largest.tokens, budgets[i].tokens);
        largest.cost = std::max(largest.cost, budgets[i].cost + slack[i]);
    }
    const auto others =
        std::stable_partition(items.begin(), items.end(), [&largest](const Item& item) {
            return item.piece.tokens() > largest.tokens || item.cost > largest.cost;
        });
    const Company all = company_of(items.begin(), items.end());
    const Company company = company_of(others, items.end());
    const size_t num_long = others - items.begin();
    return {std::move(items), num_long, all, company, std::move(budgets), std::move(slack)};
}

// How long documents choose their ranks.
enum class Order {
    kShortestFirst,  // each the fewest ranks that can take it; the longest finds what is left
    kDenseFirst,     // those above the mean density first, with room for those below it
};

Company sparse_items(const Task& task) {
    Company sparse = {0, 0};
    for (const Item& item : task.items) {
        if (task.is_dense(item)) continue;
        sparse.cost += item.cost;
        sparse.tokens += item.piece.tokens();
    }
    return sparse;
}

std::vector<SplitItem> share_out_long(const Task& task, Order order, std::vector<Budget>& budgets) {
    std::vector<SplitItem> split;
    if (order == Order::kDenseFirst) {
        const Company sparse = sparse_items(task);
        for (size_t i = 0; i < task.num_long; ++i) {
            const bool is_dense = task.is_dense(task.items[i]);
            split.push_back(share_out(task.items[i], is_dense ? sparse : task.others, budgets));
        }
        return split;
    }
    for (size_t i = task.num_long; i > 0; --i) {
        split.push_back(share_out(task.items[i - 1], {0, 0}, budgets));
    }
    return split;
}

// The three steps.
Placement place(const QueryModel& model, const Task& task, Order order,
                const PlaceOptions& options) {
    std::vector<Budget> budgets = task.budgets;
    Placement placement(budgets.size());
    std::vector<SplitItem> split = share_out_long(task, order, budgets);
    const std::vector<Item> left =
        place_whole(task.items, task.num_long, task.slack, budgets, placement);
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
    Placement shortest = place(model, task, Order::kShortestFirst, options);
    if (task.num_long == 0 || task.items.size() == 1) return shortest;
    Placement dense = place(model, task, Order::kDenseFirst, options);
    const bool is_dense_better = score(model, task, dense) < score(model, task, shortest);
    return is_dense_better ? std::move(dense) : std::move(shortest);
}

}  // namespace splitkv::planner
