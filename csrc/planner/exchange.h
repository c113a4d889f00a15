// Which query rows each rank needs and has, as sorted disjoint ranges of the query stream.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/assign.h"
#include "planner/queries.h"

namespace splitkv::planner {

// Sorted, disjoint, non-empty ranges of the query stream, one list a rank.
using RowSets = std::vector<std::vector<Range>>;

// Throws where a run is not inside its document or the group, or cp_size is none.
void check_runs(const QueryModel& model, const std::vector<Run>& runs, int64_t cp_size);

// Rows that see at least one key of each rank.
RowSets needed_rows(const QueryModel& model, const std::vector<Run>& runs, int64_t cp_size);

// Rows that both lists hold.
std::vector<Range> intersect(const std::vector<Range>& a, const std::vector<Range>& b);

// Rows that rank s owns and rank r needs, [s * cp_size + r]. The owned ranges of all ranks are
// disjoint.
std::vector<int64_t> row_counts(const RowSets& owned, const RowSets& needed);

}  // namespace splitkv::planner
