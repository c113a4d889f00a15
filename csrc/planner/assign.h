// Placement of KV tokens on ranks: equal tokens, cost balanced, few ranks for each document.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/pieces.h"
#include "planner/queries.h"

namespace splitkv::planner {

// Consecutive KV tokens of one document that live on one rank.
struct Run {
    int64_t rank;
    int64_t doc;
    int64_t begin;
    int64_t end;
};

// Ranks that are planned for: the counts of rows are a matrix over them.
constexpr int64_t kMaxRanks = int64_t{1} << 12;

struct AssignOptions {
    int64_t cp_size;
    int64_t block_size;          // a document is cut at its multiples where balance allows
    int64_t tolerance;           // accepted max/mean - 1 of the cost, in units of 1 / kTolerance
    int64_t ranks_per_node;      // divides cp_size; cp_size where all ranks are alike
    int64_t row_cost;            // cost, in pairs, of a query row that a rank attends with
    int64_t run_cost;            // cost, in pairs, of a run
    std::vector<int64_t> speed;  // of each rank, relative; empty where they are equal
};

struct Assignment {
    std::vector<Run> runs;       // ordered by (rank, doc, begin), adjacent ones joined
    std::vector<int64_t> costs;  // of each rank: visible pairs whose key is on the rank
};

// Places every KV token exactly once. Each rank gets floor(T / cp) tokens, the first T % cp ranks
// one more, and a share of the cost in proportion to its speed.
//
// Three steps (place.h): documents that fit stay whole (whole.h), the others are cut over few ranks
// (spread.h), and swaps level what is left (level.h). With several nodes the three place documents
// on nodes first, and then inside each node, whose ranks share what it took. Where rows and runs
// cost, the placement is made again with what they cost on each rank taken off its budget, and the
// best one is kept.
// Pure function of its arguments, in integers alone.
Assignment assign_blocks(const QueryModel& model, const AssignOptions& options);

// Cost of each rank, [cp_size]: visible pairs whose key is on the rank. Throws where a run is not
// inside a document and the group.
std::vector<int64_t> rank_costs(const QueryModel& model, const std::vector<Run>& runs,
                                int64_t cp_size);

}  // namespace splitkv::planner
