// Which query rows each rank needs, as sorted disjoint ranges of the query stream.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/assign.h"
#include "planner/queries.h"

namespace splitkv::planner {

// Sorted, disjoint, non-empty ranges of the query stream, one list a rank.
using RowSets = std::vector<std::vector<Range>>;

// Rows that see at least one key of each rank.
RowSets needed_rows(const QueryModel& model, const std::vector<Run>& runs, int64_t cp_size);

// Rows that both lists hold.
std::vector<Range> intersect(const std::vector<Range>& a, const std::vector<Range>& b);

}  // namespace splitkv::planner
