#include "planner/exchange.h"

#include <algorithm>

namespace splitkv::planner {
namespace {

std::vector<Range> join_overlaps(std::vector<Range> ranges) {
    std::sort(ranges.begin(), ranges.end(),
              [](const Range& a, const Range& b) { return a.begin < b.begin; });
    std::vector<Range> joined;
    for (const Range& range : ranges) {
        if (range.empty()) continue;
        if (!joined.empty() && range.begin <= joined.back().end) {
            joined.back().end = std::max(joined.back().end, range.end);
        } else {
            joined.push_back(range);
        }
    }
    return joined;
}

}  // namespace

RowSets needed_rows(const QueryModel& model, const std::vector<Run>& runs, int64_t cp_size) {
    RowSets needed(cp_size);
    for (const Run& run : runs) {
        Range rows = model.rows_seeing(run.doc, {run.begin, run.end});
        rows.begin += model.row_start(run.doc);
        rows.end += model.row_start(run.doc);
        needed[run.rank].push_back(rows);
    }
    for (std::vector<Range>& ranges : needed) ranges = join_overlaps(std::move(ranges));
    return needed;
}

std::vector<Range> intersect(const std::vector<Range>& a, const std::vector<Range>& b) {
    std::vector<Range> both;
    size_t i = 0, j = 0;
    while (i < a.size() && j < b.size()) {
        const Range overlap = {std::max(a[i].begin, b[j].begin), std::min(a[i].end, b[j].end)};
        if (!overlap.empty()) both.push_back(overlap);
        if (a[i].end < b[j].end) {
            ++i;
        } else {
            ++j;
        }
    }
    return both;
}

}  // namespace splitkv::planner
