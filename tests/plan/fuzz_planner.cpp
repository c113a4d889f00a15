// libFuzzer target of the planner: packs and options, legal and not, and runs as a caller may hand
// them in. Bad input must throw std::invalid_argument; good input must give a placement that holds
// every token once, equal tokens, exact costs and exact counts of rows.
//
//   clang++ -std=c++17 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
//       -Icsrc tests/plan/fuzz_planner.cpp
//       csrc/planner/{assign,exchange,level,place,queries,spread,whole}.cpp
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "planner/assign.h"
#include "planner/exchange.h"
#include "planner/queries.h"

namespace {

using namespace splitkv::planner;

// Reads numbers of mixed magnitude off the input; zeros where it has ended.
class Input {
  public:
    Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

    uint8_t byte() { return size_ == 0 ? 0 : (--size_, *data_++); }

    int64_t number() {
        const uint8_t kind = byte();
        if (kind < 160) return kind;
        if (kind < 220) return byte() * 256 + byte();
        int64_t value = 0;
        const size_t count = size_ < sizeof(value) ? size_ : sizeof(value);
        std::memcpy(&value, data_, count);
        data_ += count;
        size_ -= count;
        return kind < 240 ? static_cast<int64_t>(static_cast<uint64_t>(value) >> (kind - 220) * 3)
                          : value;
    }

    std::vector<int64_t> numbers(int64_t count) {
        std::vector<int64_t> values;
        for (int64_t i = 0; i < count; ++i) values.push_back(number());
        return values;
    }

  private:
    const uint8_t* data_;
    size_t size_;
};

void require(bool holds) {
    if (!holds) std::abort();
}

void check_placement(const QueryModel& model, const AssignOptions& options,
                     const Assignment& found) {
    std::vector<int64_t> next(model.num_docs(), 0), tokens(options.cp_size, 0);
    std::vector<Run> by_document = found.runs;
    std::stable_sort(by_document.begin(), by_document.end(), [](const Run& a, const Run& b) {
        return a.doc != b.doc ? a.doc < b.doc : a.begin < b.begin;
    });
    for (const Run& run : by_document) {
        require(run.begin == next[run.doc] && run.begin < run.end);
        next[run.doc] = run.end;
        tokens[run.rank] += run.end - run.begin;
    }
    for (int64_t doc = 0; doc < model.num_docs(); ++doc) {
        require(next[doc] == model.padded_len(doc));
    }
    int64_t total = 0, placed = 0;
    for (int64_t doc = 0; doc < model.num_docs(); ++doc) {
        total += model.pairs_in(doc, {0, model.padded_len(doc)});
    }
    for (int64_t rank = 0; rank < options.cp_size; ++rank) {
        const bool has_one_more = rank < model.num_tokens() % options.cp_size;
        require(tokens[rank] == model.num_tokens() / options.cp_size + (has_one_more ? 1 : 0));
        require(found.costs[rank] >= 0);
        placed += found.costs[rank];
    }
    require(placed == total);
}

void check_exchange(const QueryModel& model, const AssignOptions& options,
                    const std::vector<Run>& runs) {
    const RowSets needed = needed_rows(model, runs, options.cp_size);
    RowSets everything(1, {Range{0, model.num_rows()}});
    const std::vector<int64_t> counts = row_counts(everything, needed);
    for (int64_t rank = 0; rank < options.cp_size; ++rank) {
        int64_t rows = 0;
        for (const Range& range : needed[rank]) rows += range.end - range.begin;
        require(rows == counts[rank]);
        require(intersect(needed[rank], everything[0]).size() == needed[rank].size());
    }
}

void run(Input& input) {
    const int64_t num_docs = input.byte() % 24;
    std::vector<int64_t> lens = input.numbers(num_docs), padded = lens;
    if (input.byte() % 4 == 0) {
        for (int64_t& length : padded) length += length < kMaxCount ? input.byte() % 16 : 0;
    }
    QuerySpec spec = {static_cast<QueryKind>(input.byte() % 6), input.number(), {}, {}};
    if (spec.kind == QueryKind::kAnchors) {
        spec.anchor_ptr = {0};
        for (int64_t doc = 0; doc < num_docs; ++doc) {
            int64_t position = 0;
            for (int64_t i = input.byte() % 4; i > 0; --i) {
                position += input.byte();
                spec.anchor_positions.push_back(position);
            }
            spec.anchor_ptr.push_back(static_cast<int64_t>(spec.anchor_positions.size()));
        }
        if (input.byte() % 16 == 0) spec.anchor_ptr = input.numbers(input.byte() % 26);
    }
    if (spec.kind == QueryKind::kPrefix) {
        for (const int64_t length : lens) {
            spec.anchor_positions.push_back(
                length > 0 && length < kMaxCount ? input.number() % (length + 1) : 0);
        }
    }
    AssignOptions options = {1 + input.byte() % 40, input.number(), input.number(), 0, 0, 0, {}};
    options.ranks_per_node = input.byte() % 2 != 0 ? options.cp_size : 1 + input.byte() % 8;
    if (input.byte() % 4 == 0) options.row_cost = input.number();
    if (input.byte() % 4 == 0) options.run_cost = input.number();
    if (input.byte() % 4 == 0) options.speed = input.numbers(options.cp_size);
    if (input.byte() % 16 == 0) options.cp_size = input.number();
    const QueryModel model(std::move(lens), std::move(padded), std::move(spec));
    std::vector<Run> anything;
    for (int64_t i = input.byte() % 4; i > 0; --i) {
        anything.push_back({input.number(), input.number(), input.number(), input.number()});
    }
    if (!anything.empty()) {
        rank_costs(model, anything, options.cp_size);
        needed_rows(model, anything, options.cp_size);
    }
    const Assignment found = assign_blocks(model, options);
    check_placement(model, options, found);
    require(rank_costs(model, found.runs, options.cp_size) == found.costs);
    check_exchange(model, options, found.runs);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    Input input(data, size);
    try {
        run(input);
    } catch (const std::invalid_argument&) {
    }
    return 0;
}
