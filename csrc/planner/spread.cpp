#include "planner/spread.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace splitkv::planner {
namespace {

constexpr int64_t kWhole = int64_t{1} << 30;         // unit of the room for an item
constexpr int64_t kEnough = kWhole - kWhole / 1000;  // a thousandth may find no room
constexpr int64_t kFineSlack = 8;  // part of the slack that rounding a cut may use

struct Candidate {
    int64_t rank;
    int64_t room;  // share of the item that the rank can take
    int64_t tokens;
};

bool has_less_room(const Candidate& a, const Candidate& b) {
    return std::tie(a.room, a.tokens, b.rank) < std::tie(b.room, b.tokens, a.rank);
}

// A share x of the item and company on the other tokens cost what the budget has:
// x * item.cost + (budget.tokens - x * tokens) * density = budget.cost.
int64_t room(const Item& item, const Company& company, const Budget& budget) {
    const auto company_on = [&company](int64_t tokens) {
        return fraction_of(company.cost, tokens, company.tokens);
    };
    const int64_t tokens = item.piece.tokens();
    const int64_t by_tokens = fraction_of(kWhole, std::min(budget.tokens, tokens), tokens);
    const int64_t item_cost = item.cost - company_on(tokens);
    if (item_cost <= 0) return by_tokens;
    const int64_t cost = std::max<int64_t>(budget.cost - company_on(budget.tokens), 0);
    return std::min(by_tokens, fraction_of(kWhole, std::min(cost, item_cost), item_cost));
}

// Keys of an item that no rank has taken yet.
class Remainder {
  public:
    Remainder(const QueryModel& model, const Piece& piece) : model_(model), piece_(piece) {}

    int64_t tokens() const { return piece_.tokens(); }

    // Cost of `front` keys from the front and `tokens - front` from the back.
    int64_t cost(int64_t tokens, int64_t front) const {
        const Range dear = {piece_.begin, piece_.begin + front};
        const Range cheap = {piece_.end - (tokens - front), piece_.end};
        return model_.pairs_in(piece_.doc, dear) + model_.pairs_in(piece_.doc, cheap);
    }

    // Keys to take from the front so that `tokens` keys cost `target`, or as nearly as can be.
    // One run is taken where its cost exceeds neither `limit` nor the target by more than `fine`;
    // else the front cut falls on a multiple of `block_size` where that misses less than `fine`.
    int64_t front_keys(int64_t tokens, int64_t target, int64_t limit, int64_t fine,
                       int64_t block_size) const {
        if (cost(tokens, tokens) <= std::max(limit, target + fine)) return tokens;
        if (cost(tokens, 0) >= target - fine) return 0;
        int64_t low = 0, high = tokens;  // cost(low) < target <= cost(high)
        while (high - low > 1) {
            const int64_t middle = low + (high - low) / 2;
            (cost(tokens, middle) < target ? low : high) = middle;
        }
        const int64_t front =
            target - cost(tokens, low) <= cost(tokens, high) - target ? low : high;
        const int64_t cut = piece_.begin + front;
        const int64_t rounded = (cut + block_size / 2) / block_size * block_size - piece_.begin;
        if (rounded < 0 || rounded > tokens) return front;
        const int64_t error = cost(tokens, rounded) - target;
        return -fine <= error && error <= fine ? rounded : front;
    }

    void take(int64_t tokens, int64_t front, std::vector<Piece>& pieces) {
        const int64_t back = tokens - front;
        if (front > 0) pieces.push_back({piece_.doc, piece_.begin, piece_.begin + front});
        if (back > 0) pieces.push_back({piece_.doc, piece_.end - back, piece_.end});
        piece_.begin += front;
        piece_.end -= back;
    }

  private:
    const QueryModel& model_;
    Piece piece_;
};

// Ranks whose cost per token, with their overhead, lies farthest from the mean come first, while
// both ends are there.
void order_by_extremes(const CutOptions& options, std::vector<Share>& shares) {
    const auto density = [](__int128 cost, __int128 tokens) { return cost * 65536 / tokens; };
    __int128 cost = 0, tokens = 0;
    for (const Share& share : shares) {
        cost += share.cost + options.overhead[share.rank];
        tokens += share.tokens;
    }
    const __int128 mean = density(cost, tokens);
    const auto distance = [&](const Share& share) {
        const __int128 with_overhead = __int128{share.cost} + options.overhead[share.rank];
        const __int128 away = density(with_overhead, share.tokens) - mean;
        return (away < 0 ? -away : away) / 65536;
    };
    std::sort(shares.begin(), shares.end(), [&](const Share& a, const Share& b) {
        const __int128 distance_a = distance(a), distance_b = distance(b);
        return distance_a != distance_b ? distance_a > distance_b : a.rank < b.rank;
    });
}

void cut_item(const QueryModel& model, SplitItem& split, const CutOptions& options,
              std::vector<Budget>& budgets, Placement& placement) {
    order_by_extremes(options, split.shares);
    Remainder remainder(model, split.item.piece);
    int64_t cost_left = split.item.cost, asked = 0;
    for (const Share& share : split.shares) asked += share.cost;
    for (const Share& share : split.shares) {
        // What was asked for may be more or less than there is: all ranks bear it alike.
        const int64_t target =
            share.cost + fraction_of(cost_left - asked, share.tokens, remainder.tokens());
        const int64_t slack = options.slack[share.rank];
        const int64_t front = remainder.front_keys(share.tokens, target, share.cost + slack,
                                                   slack / kFineSlack, options.block_size);
        const int64_t taken = remainder.cost(share.tokens, front);
        remainder.take(share.tokens, front, placement[share.rank]);
        budgets[share.rank].cost += share.cost - taken;
        asked -= share.cost;
        cost_left -= taken;
    }
}

}  // namespace

SplitItem share_out(const Item& item, const Company& company, std::vector<Budget>& budgets) {
    std::vector<Candidate> heap;
    for (size_t rank = 0; rank < budgets.size(); ++rank) {
        const Budget& budget = budgets[rank];
        if (budget.tokens == 0) continue;
        heap.push_back({static_cast<int64_t>(rank), room(item, company, budget), budget.tokens});
    }
    std::make_heap(heap.begin(), heap.end(), has_less_room);
    std::vector<Candidate> ranks;
    int64_t total = 0, tokens = 0;
    while (!heap.empty() && (total < kEnough || tokens < item.piece.tokens())) {
        std::pop_heap(heap.begin(), heap.end(), has_less_room);
        ranks.push_back(heap.back());
        heap.pop_back();
        total += ranks.back().room;
        tokens += ranks.back().tokens;
    }
    SplitItem split = {item, {}};
    int64_t tokens_left = item.piece.tokens(), cost_left = item.cost;
    for (const Candidate& candidate : ranks) {
        // Where no rank has room for the cost, tokens decide.
        const int64_t part = total > 0 ? candidate.room : candidate.tokens;
        const int64_t whole = total > 0 ? total : tokens;
        const int64_t wanted = fraction_of(item.piece.tokens(), part, whole);
        split.shares.push_back({candidate.rank, std::min(candidate.tokens, wanted),
                                fraction_of(item.cost, part, whole)});
        tokens_left -= split.shares.back().tokens;
        cost_left -= split.shares.back().cost;
    }
    for (size_t i = 0; i < ranks.size() && tokens_left > 0; ++i) {
        const int64_t more = std::min(tokens_left, ranks[i].tokens - split.shares[i].tokens);
        split.shares[i].tokens += more;
        tokens_left -= more;
    }
    for (Share& share : split.shares) {
        if (share.tokens > 0) continue;
        cost_left += share.cost;
        share.cost = 0;
    }
    split.shares.front().cost += cost_left;
    for (const Share& share : split.shares) {
        budgets[share.rank].tokens -= share.tokens;
        budgets[share.rank].cost -= share.cost;
    }
    split.shares.erase(std::remove_if(split.shares.begin(), split.shares.end(),
                                      [](const Share& share) { return share.tokens == 0; }),
                       split.shares.end());
    return split;
}

void fill_up(const std::vector<Item>& items, std::vector<Budget>& budgets,
             std::vector<SplitItem>& split) {
    const auto has_fewer_tokens = [&budgets](int64_t a, int64_t b) {
        return std::tie(budgets[a].tokens, b) < std::tie(budgets[b].tokens, a);
    };
    std::vector<int64_t> heap;
    for (size_t rank = 0; rank < budgets.size(); ++rank) {
        if (budgets[rank].tokens > 0) heap.push_back(static_cast<int64_t>(rank));
    }
    std::make_heap(heap.begin(), heap.end(), has_fewer_tokens);
    for (const Item& item : items) {
        SplitItem found = {item, {}};
        for (int64_t left = item.piece.tokens(); left > 0;) {
            std::pop_heap(heap.begin(), heap.end(), has_fewer_tokens);
            const int64_t rank = heap.back();
            Budget& budget = budgets[rank];
            const int64_t tokens = std::min(left, budget.tokens);
            const int64_t cost = fraction_of(item.cost, tokens, item.piece.tokens());
            found.shares.push_back({rank, tokens, cost});
            budget.tokens -= tokens;
            budget.cost -= cost;
            left -= tokens;
            if (budget.tokens == 0) {
                heap.pop_back();
            } else {
                std::push_heap(heap.begin(), heap.end(), has_fewer_tokens);
            }
        }
        split.push_back(std::move(found));
    }
}

void cut_items(const QueryModel& model, std::vector<SplitItem> items, const CutOptions& options,
               std::vector<Budget>& budgets, Placement& placement) {
    std::stable_sort(items.begin(), items.end(), [](const SplitItem& a, const SplitItem& b) {
        return a.item.cost < b.item.cost;
    });
    std::vector<size_t> last_item(budgets.size(), 0);
    for (size_t i = 0; i < items.size(); ++i) {
        for (const Share& share : items[i].shares) last_item[share.rank] = i;
    }
    for (size_t i = 0; i < items.size(); ++i) {
        for (Share& share : items[i].shares) {
            if (last_item[share.rank] != i) continue;
            share.cost += budgets[share.rank].cost;
            budgets[share.rank].cost = 0;
        }
        cut_item(model, items[i], options, budgets, placement);
    }
}

}  // namespace splitkv::planner
