#include "planner/exchange.h"

#include <algorithm>

#include "common/check.h"

namespace splitkv::planner {
namespace {

void join_overlaps(std::vector<Range>& ranges) {
    std::sort(ranges.begin(), ranges.end(),
              [](const Range& a, const Range& b) { return a.begin < b.begin; });
    size_t num_joined = 0;
    for (const Range& range : ranges) {
        if (range.empty()) continue;
        if (num_joined > 0 && range.begin <= ranges[num_joined - 1].end) {
            Range& last = ranges[num_joined - 1];
            last.end = std::max(last.end, range.end);
        } else {
            ranges[num_joined++] = range;
        }
    }
    ranges.resize(num_joined);
}

// A range of rows with its owner.
struct OwnedRange {
    Range rows;
    int64_t rank;
};

}  // namespace

void check_runs(const QueryModel& model, const std::vector<Run>& runs, int64_t cp_size) {
    SPLITKV_CHECK(cp_size >= 1 && cp_size <= kMaxRanks, "cp_size=", cp_size,
                  " must be at least 1 and at most ", kMaxRanks);
    for (const Run& run : runs) {
        const bool is_known =
            run.rank >= 0 && run.rank < cp_size && run.doc >= 0 && run.doc < model.num_docs();
        SPLITKV_CHECK(is_known && run.begin >= 0 && run.begin <= run.end &&
                          run.end <= model.padded_len(run.doc),
                      "run (rank ", run.rank, ", document ", run.doc, ", [", run.begin, ", ",
                      run.end, ")) is not inside a document of this pack and ", cp_size, " ranks");
    }
}

RowSets needed_rows(const QueryModel& model, const std::vector<Run>& runs, int64_t cp_size) {
    check_runs(model, runs, cp_size);
    RowSets needed(cp_size);
    for (const Run& run : runs) {
        Range rows = model.rows_seeing(run.doc, {run.begin, run.end});
        rows.begin += model.row_start(run.doc);
        rows.end += model.row_start(run.doc);
        needed[run.rank].push_back(rows);
    }
    for (std::vector<Range>& ranges : needed) join_overlaps(ranges);
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

std::vector<int64_t> row_counts(const RowSets& owned, const RowSets& needed) {
    std::vector<OwnedRange> stream;
    for (size_t rank = 0; rank < owned.size(); ++rank) {
        for (const Range& rows : owned[rank]) {
            if (!rows.empty()) stream.push_back({rows, static_cast<int64_t>(rank)});
        }
    }
    std::sort(stream.begin(), stream.end(),
              [](const OwnedRange& a, const OwnedRange& b) { return a.rows.begin < b.rows.begin; });
    std::vector<int64_t> counts(owned.size() * needed.size(), 0);
    for (size_t rank = 0; rank < needed.size(); ++rank) {
        for (const Range& rows : needed[rank]) {
            auto part = std::partition_point(
                stream.begin(), stream.end(),
                [&rows](const OwnedRange& range) { return range.rows.end <= rows.begin; });
            for (; part != stream.end() && part->rows.begin < rows.end; ++part) {
                counts[part->rank * needed.size() + rank] +=
                    std::min(part->rows.end, rows.end) - std::max(part->rows.begin, rows.begin);
            }
        }
    }
    return counts;
}

}  // namespace splitkv::planner
