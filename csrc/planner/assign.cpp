#include "planner/assign.h"

#include <algorithm>
#include <queue>
#include <tuple>

#include "common/check.h"

namespace splitkv::planner {
namespace {

// A whole document or one block of it, still to be placed.
struct Item {
    int64_t cost;
    int64_t doc;
    int64_t begin;
    int64_t end;
    bool is_whole;
};

struct RankState {
    int64_t load;
    int64_t rank;
    int64_t free_tokens;
    bool operator>(const RankState& other) const {
        return std::tie(load, rank) > std::tie(other.load, other.rank);
    }
};

// Documents of at most `whole_tokens` become one item, longer ones are cut into blocks. Whole
// documents come first, because the small blocks level whatever loads and gaps they leave.
std::vector<Item> make_items(const QueryModel& model, int64_t block_size, int64_t whole_tokens) {
    std::vector<Item> items;
    for (int64_t doc = 0; doc < model.num_docs(); ++doc) {
        const int64_t length = model.padded_len(doc);
        const int64_t step = length <= whole_tokens ? length : block_size;
        for (int64_t begin = 0; begin < length;) {
            const int64_t end = begin + std::min(step, length - begin);
            items.push_back({model.pairs_in(doc, {begin, end}), doc, begin, end, step == length});
            begin = end;
        }
    }
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
        return std::tie(b.is_whole, b.cost) < std::tie(a.is_whole, a.cost);
    });
    return items;
}

// Ranks by load. A rank leaves for good when its token cap is reached.
class RankHeap {
  public:
    RankHeap(int64_t num_tokens, int64_t cp_size) {
        for (int64_t rank = 0; rank < cp_size; ++rank) {
            push({0, rank, num_tokens / cp_size + (rank < num_tokens % cp_size ? 1 : 0)});
        }
    }

    // Takes the least loaded rank with room for `tokens`, else the least loaded one with any room.
    RankState take(int64_t tokens) {
        std::vector<RankState> too_full;
        while (!heap_.empty() && heap_.top().free_tokens < tokens) {
            too_full.push_back(heap_.top());
            heap_.pop();
        }
        RankState taken;
        if (heap_.empty()) {
            taken = too_full.front();
            too_full.erase(too_full.begin());
        } else {
            taken = heap_.top();
            heap_.pop();
        }
        for (const RankState& state : too_full) heap_.push(state);
        return taken;
    }

    void push(const RankState& state) {
        if (state.free_tokens > 0) heap_.push(state);
    }

  private:
    std::priority_queue<RankState, std::vector<RankState>, std::greater<RankState>> heap_;
};

std::vector<Run> place(const QueryModel& model, const std::vector<Item>& items, int64_t cp_size) {
    std::vector<Run> runs;
    runs.reserve(items.size() + cp_size);
    RankHeap ranks(model.num_tokens(), cp_size);
    for (const Item& item : items) {
        int64_t begin = item.begin;
        while (begin < item.end) {  // more than one turn only where a cap cuts the item
            RankState state = ranks.take(item.end - begin);
            const int64_t end = std::min(item.end, begin + state.free_tokens);
            runs.push_back({state.rank, item.doc, begin, end});
            state.load += model.pairs_in(item.doc, {begin, end});
            state.free_tokens -= end - begin;
            ranks.push(state);
            begin = end;
        }
    }
    return runs;
}

void check_num_blocks(int64_t num_tokens, int64_t block_size) {
    int64_t enough = block_size;
    while (num_tokens / enough > kMaxBlocks) enough *= 2;
    SPLITKV_CHECK(enough == block_size, "block_size=", block_size, " cuts ", num_tokens,
                  " tokens into more than ", kMaxBlocks,
                  " blocks, the most that are planned; use block_size=", enough);
}

std::vector<Run> join_adjacent(std::vector<Run> runs) {
    std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) {
        return std::tie(a.rank, a.doc, a.begin) < std::tie(b.rank, b.doc, b.begin);
    });
    std::vector<Run> joined;
    for (const Run& run : runs) {
        if (!joined.empty() && joined.back().rank == run.rank && joined.back().doc == run.doc &&
            joined.back().end == run.begin) {
            joined.back().end = run.end;
        } else {
            joined.push_back(run);
        }
    }
    return joined;
}

}  // namespace

std::vector<int64_t> rank_costs(const QueryModel& model, const std::vector<Run>& runs,
                                int64_t cp_size) {
    std::vector<int64_t> costs(cp_size, 0);
    for (const Run& run : runs) {
        costs[run.rank] += model.pairs_in(run.doc, {run.begin, run.end});
    }
    return costs;
}

std::vector<Run> assign_blocks(const QueryModel& model, const AssignOptions& options) {
    SPLITKV_CHECK(options.cp_size >= 1, "cp_size=", options.cp_size, " must be at least 1");
    SPLITKV_CHECK(options.block_size >= 1, "block_size=", options.block_size,
                  " must be at least 1 token");
    check_num_blocks(model.num_tokens(), options.block_size);
    int64_t total = 0;
    for (int64_t doc = 0; doc < model.num_docs(); ++doc) {
        total += model.pairs_before(doc, model.len(doc));
    }
    const double accepted = (1.0 + options.tolerance) * total / options.cp_size;
    int64_t whole_tokens =
        model.num_tokens() / options.cp_size + (model.num_tokens() % options.cp_size != 0 ? 1 : 0);
    int64_t best_cost = -1;
    std::vector<Run> best;
    while (true) {
        if (whole_tokens <= options.block_size) whole_tokens = 0;
        std::vector<Run> runs =
            place(model, make_items(model, options.block_size, whole_tokens), options.cp_size);
        const std::vector<int64_t> costs = rank_costs(model, runs, options.cp_size);
        const int64_t cost = *std::max_element(costs.begin(), costs.end());
        if (best_cost < 0 || cost < best_cost) {
            best_cost = cost;
            best = std::move(runs);
        }
        if (best_cost <= accepted || whole_tokens == 0) return join_adjacent(std::move(best));
        whole_tokens /= 2;
    }
}

}  // namespace splitkv::planner
