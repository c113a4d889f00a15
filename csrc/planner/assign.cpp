#include "planner/assign.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "common/check.h"
#include "planner/exchange.h"
#include "planner/place.h"
#include "planner/sort.h"

namespace splitkv::planner {
namespace {

constexpr int kRounds = 4;  // placements made for the overheads of rows and runs

void check_options(const AssignOptions& options) {
    SPLITKV_CHECK(options.cp_size >= 1 && options.cp_size <= kMaxRanks, "cp_size=", options.cp_size,
                  " must be at least 1 and at most ", kMaxRanks);
    SPLITKV_CHECK(options.block_size >= 1 && options.block_size <= INT32_MAX,
                  "block_size=", options.block_size, " must be at least 1 token and fit 31 bits");
    SPLITKV_CHECK(options.tolerance >= 0 && options.tolerance <= kTolerance,
                  "tolerance=", options.tolerance, " must lie in [0, ", kTolerance, "]");
    SPLITKV_CHECK(options.ranks_per_node >= 1 && options.cp_size % options.ranks_per_node == 0,
                  "ranks_per_node=", options.ranks_per_node,
                  " must divide cp_size=", options.cp_size);
    SPLITKV_CHECK(options.row_cost >= 0 && options.run_cost >= 0, "row_cost=", options.row_cost,
                  " and run_cost=", options.run_cost, " must be at least 0 pairs");
    SPLITKV_CHECK(
        options.speed.empty() || static_cast<int64_t>(options.speed.size()) == options.cp_size,
        "speeds are given for ", options.speed.size(), " ranks, but cp_size=", options.cp_size);
    for (const int64_t speed : options.speed) {
        SPLITKV_CHECK(speed >= 1 && speed <= INT32_MAX, "speed ", speed,
                      " of a rank must be at least 1 and fit 31 bits");
    }
}

// Pieces with their costs, the dearest first. Those without tokens are left out.
template <typename PieceAt>
std::vector<Item> dearest_first(const QueryModel& model, int64_t count, const PieceAt& piece_at) {
    std::vector<Keyed> order;
    order.reserve(count);
    int64_t dearest = 0;
    for (int64_t i = 0; i < count; ++i) {
        const Piece piece = piece_at(i);
        if (piece.tokens() == 0) continue;
        order.push_back({model.pairs_in(piece.doc, {piece.begin, piece.end}), i});
        dearest = std::max(dearest, order.back().first);
    }
    for (Keyed& entry : order) entry.first = dearest - entry.first;
    sort_by_key(order);
    std::vector<Item> items;
    items.reserve(order.size());
    for (const auto& [below_dearest, i] : order) {
        items.push_back({piece_at(i), dearest - below_dearest});
    }
    return items;
}

void add_runs(int64_t rank, std::vector<Piece>& pieces, std::vector<Run>& runs) {
    std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
        return std::tie(a.doc, a.begin) < std::tie(b.doc, b.begin);
    });
    for (const Piece& piece : pieces) {
        Run* last = runs.empty() ? nullptr : &runs.back();
        if (last != nullptr && last->rank == rank && last->doc == piece.doc &&
            last->end == piece.begin) {
            last->end = piece.end;
        } else {
            runs.push_back({rank, piece.doc, piece.begin, piece.end});
        }
    }
}

// What a rank, or a node of ranks, is to take.
struct Demand {
    std::vector<Budget> budgets;
    std::vector<int64_t> overhead;  // of rows and runs, taken off the budgets
};

// Sums over nodes of consecutive ranks.
Demand of_nodes(const Demand& ranks, int64_t ranks_per_node) {
    const size_t num_nodes = ranks.budgets.size() / ranks_per_node;
    Demand nodes = {std::vector<Budget>(num_nodes, Budget{0, 0}),
                    std::vector<int64_t>(num_nodes, 0)};
    for (size_t rank = 0; rank < ranks.budgets.size(); ++rank) {
        const size_t node = rank / ranks_per_node;
        nodes.budgets[node].tokens += ranks.budgets[rank].tokens;
        nodes.budgets[node].cost += ranks.budgets[rank].cost;
        nodes.overhead[node] += ranks.overhead[rank];
    }
    return nodes;
}

// What the ranks from `first` on are to take of `items`: what their node missed, all bear alike.
Demand of_ranks(const Demand& ranks, int64_t first, int64_t count, const std::vector<Item>& items) {
    Demand found = {{ranks.budgets.begin() + first, ranks.budgets.begin() + first + count},
                    {ranks.overhead.begin() + first, ranks.overhead.begin() + first + count}};
    int64_t missed = 0, tokens = 0;
    for (const Item& item : items) missed += item.cost;
    for (const Budget& budget : found.budgets) {
        missed -= budget.cost;
        tokens += budget.tokens;
    }
    for (Budget& budget : found.budgets) {
        if (budget.tokens == 0) continue;
        const int64_t part = fraction_of(missed, budget.tokens, tokens);
        budget.cost += part;
        missed -= part;
        tokens -= budget.tokens;
    }
    return found;
}

std::vector<Run> place_on_ranks(const QueryModel& model, const std::vector<Item>& items,
                                const Demand& demand, const AssignOptions& options) {
    const int64_t per_node = options.ranks_per_node;
    const int64_t num_nodes = options.cp_size / per_node;
    // What the two levels miss adds up.
    const int64_t tolerance = num_nodes == 1 ? options.tolerance : options.tolerance / 2;
    const auto place = [&](const std::vector<Item>& part, const Demand& bins) {
        return place_items(model, part, bins.budgets,
                           {options.block_size, tolerance, bins.overhead});
    };
    std::vector<std::vector<Item>> items_on(num_nodes);
    if (num_nodes > 1) {
        const Placement placement = place(items, of_nodes(demand, per_node));
        for (int64_t node = 0; node < num_nodes; ++node) {
            const std::vector<Piece>& pieces = placement[node];
            items_on[node] = dearest_first(model, static_cast<int64_t>(pieces.size()),
                                           [&pieces](int64_t i) { return pieces[i]; });
        }
    }
    std::vector<Run> runs;
    runs.reserve(items.size() + 4 * options.cp_size);
    for (int64_t node = 0; node < num_nodes; ++node) {
        const std::vector<Item>& own = num_nodes == 1 ? items : items_on[node];
        Placement placement = place(own, of_ranks(demand, node * per_node, per_node, own));
        for (int64_t rank = 0; rank < per_node; ++rank) {
            add_runs(node * per_node + rank, placement[rank], runs);
        }
    }
    return runs;
}

// All that rows and runs may cost must fit beside the pairs.
void check_overheads(const QueryModel& model, const AssignOptions& options) {
    const __int128 rows = static_cast<__int128>(options.row_cost) * model.num_rows();
    const __int128 runs = static_cast<__int128>(options.run_cost) * model.num_tokens();
    SPLITKV_CHECK(rows <= (kMaxCount - runs) / options.cp_size, "row_cost=", options.row_cost,
                  " and run_cost=", options.run_cost,
                  " pairs bring the cost of this pack beyond 2^61; use smaller ones");
}

// What rows and runs cost each rank, in pairs.
std::vector<int64_t> overheads(const QueryModel& model, const std::vector<Run>& runs,
                               const AssignOptions& options) {
    std::vector<int64_t> costs(options.cp_size, 0);
    if (options.row_cost > 0) {
        const RowSets needed = needed_rows(model, runs, options.cp_size);
        for (int64_t rank = 0; rank < options.cp_size; ++rank) {
            for (const Range& rows : needed[rank]) {
                costs[rank] += options.row_cost * (rows.end - rows.begin);
            }
        }
    }
    for (const Run& run : runs) costs[run.rank] += options.run_cost;
    return costs;
}

std::vector<int64_t> sum_costs(const QueryModel& model, const std::vector<Run>& runs,
                               int64_t cp_size) {
    std::vector<int64_t> costs(cp_size, 0);
    for (const Run& run : runs) costs[run.rank] += model.pairs_in(run.doc, {run.begin, run.end});
    return costs;
}

// Cost of each rank's share of `total`, in proportion to its speed.
std::vector<int64_t> targets(int64_t total, const AssignOptions& options) {
    const int64_t all = options.speed.empty() ? options.cp_size
                                              : std::accumulate(options.speed.begin(),
                                                                options.speed.end(), int64_t{0});
    std::vector<int64_t> costs(options.cp_size);
    for (int64_t rank = 0; rank < options.cp_size; ++rank) {
        costs[rank] = fraction_of(total, options.speed.empty() ? 1 : options.speed[rank], all);
    }
    return costs;
}

// Time of the slowest rank: its cost over its speed, in pairs at the mean speed.
__int128 slowest(const std::vector<int64_t>& costs, const std::vector<int64_t>& extra,
                 const AssignOptions& options) {
    __int128 worst = 0;
    for (size_t rank = 0; rank < costs.size(); ++rank) {
        const __int128 scaled = static_cast<__int128>(costs[rank] + extra[rank]) << 31;
        worst = std::max(worst, scaled / (options.speed.empty() ? 1 : options.speed[rank]));
    }
    return worst;
}

}  // namespace

std::vector<int64_t> rank_costs(const QueryModel& model, const std::vector<Run>& runs,
                                int64_t cp_size) {
    check_runs(model, runs, cp_size);
    return sum_costs(model, runs, cp_size);
}

Assignment assign_blocks(const QueryModel& model, const AssignOptions& options) {
    check_options(options);
    check_overheads(model, options);
    const std::vector<Item> items = dearest_first(model, model.num_docs(), [&model](int64_t doc) {
        return Piece{doc, 0, model.padded_len(doc)};
    });
    int64_t total = 0;
    for (const Item& item : items) total += item.cost;
    const int64_t cp_size = options.cp_size, num_tokens = model.num_tokens();
    std::vector<int64_t> extra(cp_size, 0);
    Assignment best;
    __int128 best_time = -1;
    for (int round = 0; round < kRounds; ++round) {
        const int64_t all_extra = std::accumulate(extra.begin(), extra.end(), int64_t{0});
        const std::vector<int64_t> share = targets(total + all_extra, options);
        Demand demand = {{}, extra};
        for (int64_t rank = 0; rank < cp_size; ++rank) {
            const int64_t tokens = num_tokens / cp_size + (rank < num_tokens % cp_size ? 1 : 0);
            demand.budgets.push_back({tokens, share[rank] - extra[rank]});
        }
        Assignment found = {place_on_ranks(model, items, demand, options), {}};
        found.costs = sum_costs(model, found.runs, cp_size);
        extra = overheads(model, found.runs, options);
        const __int128 time = slowest(found.costs, extra, options);
        const bool is_better = best_time < 0 || time < best_time;
        if (is_better) {
            best = std::move(found);
            best_time = time;
        }
        if (!is_better || (options.row_cost == 0 && options.run_cost == 0)) break;
    }
    return best;
}

}  // namespace splitkv::planner
