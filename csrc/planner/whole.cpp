#include "planner/whole.h"

#include <algorithm>
#include <cstdlib>

namespace splitkv::planner {
namespace {

// Ranks tried for an item before it is left to be cut: near the end most have no room.
constexpr size_t kTries = 8;

// Heap of ranks, the one with the densest budget on top. Full ranks are not in it.
class DensestRank {
  public:
    explicit DensestRank(const std::vector<Budget>& budgets) : budgets_(budgets) {
        uint64_t largest = 0;
        for (const Budget& budget : budgets)
            largest |= static_cast<uint64_t>(std::abs(budget.cost));
        while (shift_ > 0 && largest >> (62 - shift_) != 0) --shift_;
        for (size_t rank = 0; rank < budgets.size(); ++rank) push(static_cast<int64_t>(rank));
    }

    bool empty() const { return heap_.empty(); }
    int64_t top() const { return heap_.front().rank; }

    void push(int64_t rank) {
        if (budgets_[rank].tokens == 0) return;
        heap_.push_back({density(rank), rank});
        std::push_heap(heap_.begin(), heap_.end());
    }

    void pop() {
        std::pop_heap(heap_.begin(), heap_.end());
        heap_.pop_back();
    }

    // The budget of the top has shrunk.
    void update_top() {
        if (budgets_[top()].tokens == 0) return pop();
        const Entry entry = {density(top()), top()};
        size_t at = 0;
        for (size_t child = 1; child < heap_.size(); child = 2 * at + 1) {
            if (child + 1 < heap_.size() && heap_[child] < heap_[child + 1]) ++child;
            if (!(entry < heap_[child])) break;
            heap_[at] = heap_[child];
            at = child;
        }
        heap_[at] = entry;
    }

  private:
    struct Entry {
        int64_t density;
        int64_t rank;
        bool operator<(const Entry& other) const {
            return density != other.density ? density < other.density : rank > other.rank;
        }
    };

    // Cost per token in fixed point.
    int64_t density(int64_t rank) const {
        return (budgets_[rank].cost * (int64_t{1} << shift_)) / budgets_[rank].tokens;
    }

    const std::vector<Budget>& budgets_;
    int shift_ = 16;
    std::vector<Entry> heap_;
};

}  // namespace

std::vector<Item> place_whole(const std::vector<Item>& items, const std::vector<bool>& is_long,
                              const std::vector<int64_t>& slack, std::vector<Budget>& budgets,
                              Placement& placement) {
    DensestRank ranks(budgets);
    std::vector<Item> left;
    std::vector<int64_t> refused;
    for (size_t i = 0; i < items.size(); ++i) {
        if (is_long[i]) continue;
        const Item& item = items[i];
        const int64_t tokens = item.piece.tokens();
        bool is_placed = false;
        refused.clear();
        while (!is_placed && !ranks.empty() && refused.size() < kTries) {
            const int64_t rank = ranks.top();
            Budget& budget = budgets[rank];
            const int64_t cost_limit = std::max<int64_t>(budget.cost + slack[rank], 0);
            if (tokens <= budget.tokens && item.cost <= cost_limit) {
                placement[rank].push_back(item.piece);
                budget.tokens -= tokens;
                budget.cost -= item.cost;
                ranks.update_top();
                is_placed = true;
            } else {
                refused.push_back(rank);
                ranks.pop();
            }
        }
        for (const int64_t rank : refused) ranks.push(rank);
        if (!is_placed) left.push_back(item);
    }
    return left;
}

}  // namespace splitkv::planner
