#include "planner/level.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "planner/sort.h"

namespace splitkv::planner {
namespace {

constexpr int kSwapsPerRank = 256;   // above its budget: what these do not level, more will not
constexpr int64_t kPiecesTried = 5;  // of each of the two ranks, from the dearest to the cheapest

// `tokens` keys of piece `dear` of one rank, from key `offset` on, against as many from the back of
// piece `cheap` of the other.
struct Swap {
    size_t dear;
    size_t cheap;
    int64_t rows;  // query rows that come to travel, at most
    int64_t offset;
    int64_t tokens;
    int64_t gain;  // cost that changes sides
};

bool has_document(const std::vector<Piece>& pieces, int64_t doc) {
    return std::any_of(pieces.begin(), pieces.end(),
                       [doc](const Piece& piece) { return piece.doc == doc; });
}

int64_t front_cost(const QueryModel& model, const Piece& piece) {
    return model.pairs_in(piece.doc, {piece.begin, piece.begin + 1});
}

int64_t back_cost(const QueryModel& model, const Piece& piece) {
    return model.pairs_in(piece.doc, {piece.end - 1, piece.end});
}

// Up to kPiecesTried pieces in the order of what one of their keys costs, the first and the last
// among them, evenly spaced by tokens: splinters that swaps leave do not crowd out large pieces.
std::vector<size_t> spaced_pieces(const QueryModel& model, const std::vector<Piece>& pieces,
                                  int64_t (*key_cost)(const QueryModel&, const Piece&)) {
    std::vector<Keyed> order(pieces.size());
    for (size_t i = 0; i < pieces.size(); ++i) {
        order[i] = {key_cost(model, pieces[i]), static_cast<int64_t>(i)};
    }
    sort_by_key(order);
    int64_t tokens = 0, passed = 0;
    for (const Piece& piece : pieces) tokens += piece.tokens();
    std::vector<size_t> chosen;
    for (const auto& [cost, i] : order) {
        passed += pieces[i].tokens();
        const int64_t next = static_cast<int64_t>(chosen.size());
        if (passed >= fraction_of(tokens, next, kPiecesTried - 1)) chosen.push_back(i);
    }
    return chosen;
}

// What a swap is to gain.
struct Aim {
    int64_t wanted;
    int64_t good;   // may be missed
    int64_t limit;  // from here on the two ranks change places, or worse
};

class Exchange {
  public:
    Exchange(const QueryModel& model, const Piece& dear, const Piece& cheap)
        : model_(model), dear_(dear), cheap_(cheap) {}

    int64_t gain(int64_t tokens, int64_t offset = 0) const {
        const int64_t begin = dear_.begin + offset;
        return model_.pairs_in(dear_.doc, {begin, begin + tokens}) -
               model_.pairs_in(cheap_.doc, {cheap_.end - tokens, cheap_.end});
    }

    // What another pair of keys gains after `tokens` of them.
    int64_t next_gain(int64_t tokens) const {
        const int64_t dear = dear_.begin + tokens, cheap = cheap_.end - tokens - 1;
        return model_.pairs_in(dear_.doc, {dear, dear + 1}) -
               model_.pairs_in(cheap_.doc, {cheap, cheap + 1});
    }

    // No number of tokens gains more: the first pair of keys gains most.
    __int128 most_gain() const {
        return static_cast<__int128>(gain(1)) * std::min(dear_.tokens(), cheap_.tokens());
    }

    // Sets tokens, offset and gain to what comes closest to what is wanted: the fewest keys from
    // the front that gain as much, or, where that misses by more than `good`, as many keys farther
    // back.
    void meet(const Aim& aim, Swap& swap) const {
        const int64_t most = std::min(dear_.tokens(), cheap_.tokens());
        // The gain rises ever less with the tokens, then falls: between these the search is short.
        const int64_t end = gain(most) >= aim.wanted
                                ? fraction_of(aim.wanted, most, gain(most)) + 1
                                : first(0, most, [this](int64_t n) { return next_gain(n) <= 0; });
        const int64_t peak = std::min(end, most), begin = std::min(aim.wanted / gain(1), peak);
        int64_t tokens = first(begin, peak, [&](int64_t n) { return gain(n) >= aim.wanted; });
        int64_t offset = 0;
        const int64_t beyond = gain(tokens) - aim.wanted;
        if (tokens > 1 && beyond > aim.good && aim.wanted - gain(tokens - 1) <= aim.good) {
            --tokens;
        } else if (beyond > aim.good) {
            offset = first(0, dear_.tokens() - tokens,
                           [&](int64_t i) { return gain(tokens, i) <= aim.wanted; });
            const bool is_too_far = offset > 0 && aim.wanted - gain(tokens, offset) >
                                                      gain(tokens, offset - 1) - aim.wanted;
            // Where no key farther back is worth something, the front may still be.
            if (is_too_far || gain(tokens, offset) <= 0) offset = std::max<int64_t>(offset - 1, 0);
        }
        swap.tokens = tokens;
        swap.offset = offset;
        swap.gain = gain(tokens, offset);
    }

  private:
    // First number of [begin, end) that satisfies a predicate that stays true, or `end`.
    template <typename Predicate>
    static int64_t first(int64_t begin, int64_t end, Predicate predicate) {
        while (begin < end) {
            const int64_t middle = begin + (end - begin) / 2;
            if (predicate(middle)) {
                end = middle;
            } else {
                begin = middle + 1;
            }
        }
        return begin;
    }

    const QueryModel& model_;
    const Piece& dear_;
    const Piece& cheap_;
};

// Pairs of pieces to try, those that make the fewest rows travel first. A rank that has a document
// already has its rows, or most of them.
std::vector<Swap> possible_swaps(const QueryModel& model, const std::vector<Piece>& above,
                                 const std::vector<Piece>& below) {
    const auto rows = [&model](const Piece& piece, const std::vector<Piece>& to) {
        if (has_document(to, piece.doc)) return int64_t{0};
        const Range seeing = model.rows_seeing(piece.doc, {piece.begin, piece.end});
        return seeing.end - seeing.begin;
    };
    const std::vector<size_t> dear = spaced_pieces(model, above, front_cost);
    const std::vector<size_t> cheap = spaced_pieces(model, below, back_cost);
    std::vector<int64_t> cheap_rows(cheap.size());
    for (size_t j = 0; j < cheap.size(); ++j) cheap_rows[j] = rows(below[cheap[j]], above);
    std::vector<Swap> swaps;
    for (const size_t i : dear) {
        const int64_t dear_rows = rows(above[i], below);
        for (size_t j = 0; j < cheap.size(); ++j) {
            swaps.push_back({i, cheap[j], dear_rows + cheap_rows[j], 0, 0, 0});
        }
    }
    std::sort(swaps.begin(), swaps.end(), [](const Swap& a, const Swap& b) {
        return std::tie(a.rows, a.dear, a.cheap) < std::tie(b.rows, b.dear, b.cheap);
    });
    return swaps;
}

// The first swap that gains what is wanted, to within `good`, else the one that gains most; a swap
// without tokens where none helps.
Swap best_swap(const QueryModel& model, const std::vector<Piece>& above,
               const std::vector<Piece>& below, const Aim& aim) {
    Swap best = {0, 0, 0, 0, 0, 0};
    for (Swap& swap : possible_swaps(model, above, below)) {
        const Exchange exchange(model, above[swap.dear], below[swap.cheap]);
        if (exchange.most_gain() <= best.gain) continue;
        exchange.meet(aim, swap);
        if (aim.wanted - aim.good <= swap.gain && swap.gain <= aim.wanted + aim.good) return swap;
        if (swap.gain > best.gain && swap.gain < aim.limit) best = swap;
    }
    return best;
}

void apply(const Swap& swap, std::vector<Piece>& above, std::vector<Piece>& below) {
    Piece& dear = above[swap.dear];
    Piece& cheap = below[swap.cheap];
    const int64_t begin = dear.begin + swap.offset;
    const Piece given = {dear.doc, begin, begin + swap.tokens};
    const Piece taken = {cheap.doc, cheap.end - swap.tokens, cheap.end};
    const Piece before = {dear.doc, dear.begin, begin};
    dear.begin = given.end;
    cheap.end -= swap.tokens;
    if (dear.tokens() == 0) above.erase(above.begin() + static_cast<std::ptrdiff_t>(swap.dear));
    if (cheap.tokens() == 0) below.erase(below.begin() + static_cast<std::ptrdiff_t>(swap.cheap));
    if (before.tokens() > 0) above.push_back(before);
    above.push_back(taken);
    below.push_back(given);
}

}  // namespace

void level(const QueryModel& model, const std::vector<int64_t>& slack, std::vector<Budget>& budgets,
           Placement& placement) {
    // Ranks by what they may still cost: those farthest above their budgets first.
    std::set<std::pair<int64_t, size_t>> order;
    for (size_t rank = 0; rank < budgets.size(); ++rank) order.insert({budgets[rank].cost, rank});
    std::vector<int> num_swaps(budgets.size(), 0);
    while (true) {
        const auto [excess, above] = *order.begin();
        const auto [deficit, below] = *order.rbegin();
        if (-excess <= slack[above] || num_swaps[above]++ == kSwapsPerRank) return;
        // The rank below may end half its slack above its budget: where nobody misses much, small
        // swaps would not come to an end.
        const int64_t room = deficit + slack[below] / 2;
        if (room <= 0) return;
        const Aim aim = {std::min(-excess, room), slack[above] / 2, deficit - excess};
        const Swap swap = best_swap(model, placement[above], placement[below], aim);
        if (swap.tokens == 0) return;
        apply(swap, placement[above], placement[below]);
        for (const size_t rank : {above, below}) order.erase({budgets[rank].cost, rank});
        budgets[above].cost += swap.gain;
        budgets[below].cost -= swap.gain;
        for (const size_t rank : {above, below}) order.insert({budgets[rank].cost, rank});
    }
}

}  // namespace splitkv::planner
