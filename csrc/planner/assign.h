// Placement of KV blocks on ranks: cost-aware longest-processing-time-first with exact token caps.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/queries.h"

namespace splitkv::planner {

// Consecutive KV tokens of one document that live on one rank.
struct Run {
    int64_t rank;
    int64_t doc;
    int64_t begin;
    int64_t end;
};

// Blocks that are planned within seconds; at 512 tokens a block, packs of two thousand million.
constexpr int64_t kMaxBlocks = int64_t{1} << 22;

struct AssignOptions {
    int64_t cp_size;
    int64_t block_size;  // tokens of a block; the last block of a document may be shorter
    double tolerance;    // accepted max/mean - 1 of the cost
};

// Places every KV token exactly once and returns the runs ordered by (rank, doc, begin), adjacent
// blocks joined. Each rank gets floor(T / cp) tokens, the first T % cp ranks one more.
//
// Documents that fit a rank are first kept whole; while the balance misses `tolerance` the length
// up to which documents stay whole is halved, and at last every document is cut into blocks. The
// first plan within tolerance wins, else the best balanced one. Pure function of its arguments.
// Throws where the tokens make more than kMaxBlocks blocks.
std::vector<Run> assign_blocks(const QueryModel& model, const AssignOptions& options);

// Cost of each rank, [cp_size]: visible pairs whose key is on the rank.
std::vector<int64_t> rank_costs(const QueryModel& model, const std::vector<Run>& runs,
                                int64_t cp_size);

}  // namespace splitkv::planner
