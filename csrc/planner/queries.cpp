#include "planner/queries.h"

#include <algorithm>
#include <utility>

#include "common/check.h"

namespace splitkv::planner {
namespace {

// Key j of a document of `len` tokens is seen by min(size, len - j) rows, both when a row sees the
// last `size` keys (window) and when only the last `size` rows are queries (suffix).
int64_t banded_pairs_before(int64_t len, int64_t size, int64_t x) {
    const int64_t flat = std::min(x, std::max<int64_t>(0, len - size));
    return flat * size + falling_sum(len - flat, x - flat);
}

std::vector<int64_t> prefix_sums(const std::vector<int64_t>& values) {
    std::vector<int64_t> sums(values.size() + 1, 0);
    for (size_t i = 0; i < values.size(); ++i) sums[i + 1] = sums[i] + values[i];
    return sums;
}

// Upper bound on the query rows of a document that see one key; pads see none.
__int128 rows_per_key(const QuerySpec& spec, size_t doc, int64_t len) {
    switch (spec.kind) {
        case QueryKind::kWindow:
        case QueryKind::kSuffix:
            return std::min(spec.size, len);
        case QueryKind::kAnchors:
            return static_cast<__int128>(spec.anchor_ptr[doc + 1] - spec.anchor_ptr[doc]) *
                   spec.size;
        default:
            return len;
    }
}

// Tokens, rows, and rows times keys must fit: they bound every sum and product of the closed forms.
void check_counts(const std::vector<int64_t>& doc_lens, const std::vector<int64_t>& padded_lens,
                  const QuerySpec& spec) {
    constexpr __int128 kLimit = kMaxCount;
    __int128 tokens = 0, rows = 0, pairs = 0;
    for (size_t doc = 0; doc < doc_lens.size(); ++doc) {
        const __int128 seeing = rows_per_key(spec, doc, doc_lens[doc]);
        tokens += padded_lens[doc];
        rows += seeing;
        SPLITKV_CHECK(tokens <= kLimit && rows <= kLimit, "document ", doc, " of ",
                      padded_lens[doc],
                      " tokens brings the tokens or query rows of the pack beyond 2^61; "
                      "plan a smaller pack");
        pairs += seeing * doc_lens[doc];
        SPLITKV_CHECK(pairs <= kLimit, "document ", doc, " of ", doc_lens[doc],
                      " tokens brings query rows times keys of the pack beyond 2^61; "
                      "plan shorter documents or a smaller pack");
    }
}

void check_anchors(const std::vector<int64_t>& doc_lens, const QuerySpec& spec) {
    SPLITKV_CHECK(spec.anchor_ptr.size() == doc_lens.size() + 1, "anchors are given for ",
                  static_cast<int64_t>(spec.anchor_ptr.size()) - 1, " documents, but there are ",
                  doc_lens.size(), "; give one list for each document (it may be empty)");
    SPLITKV_CHECK(
        spec.anchor_ptr.front() == 0 &&
            spec.anchor_ptr.back() == static_cast<int64_t>(spec.anchor_positions.size()) &&
            std::is_sorted(spec.anchor_ptr.begin(), spec.anchor_ptr.end()),
        "anchor_ptr must ascend from 0 to the number of anchors, ", spec.anchor_positions.size());
    for (size_t doc = 0; doc < doc_lens.size(); ++doc) {
        int64_t previous = 0;
        for (int64_t i = spec.anchor_ptr[doc]; i < spec.anchor_ptr[doc + 1]; ++i) {
            const int64_t position = spec.anchor_positions[i];
            SPLITKV_CHECK(position >= previous && position <= doc_lens[doc], "anchor position ",
                          position, " of document ", doc, " must ascend and lie in [0, ",
                          doc_lens[doc], "]; sort the anchors of each document");
            previous = position;
        }
    }
}

void check_prefixes(const std::vector<int64_t>& doc_lens, const QuerySpec& spec) {
    SPLITKV_CHECK(spec.anchor_positions.size() == doc_lens.size(), "prefixes are given for ",
                  spec.anchor_positions.size(), " documents, but there are ", doc_lens.size());
    for (size_t doc = 0; doc < doc_lens.size(); ++doc) {
        const int64_t prefix = spec.anchor_positions[doc];
        SPLITKV_CHECK(prefix >= 0 && prefix <= doc_lens[doc], "prefix ", prefix, " of document ",
                      doc, " must lie in [0, ", doc_lens[doc], "]");
    }
}

}  // namespace

QueryModel::QueryModel(std::vector<int64_t> doc_lens, std::vector<int64_t> padded_lens,
                       QuerySpec spec)
    : doc_lens_(std::move(doc_lens)), padded_lens_(std::move(padded_lens)), spec_(std::move(spec)) {
    SPLITKV_CHECK(doc_lens_.size() == padded_lens_.size(), "padded_lens has ", padded_lens_.size(),
                  " documents, doc_lens has ", doc_lens_.size(), "; both describe the same pack");
    for (size_t doc = 0; doc < doc_lens_.size(); ++doc) {
        SPLITKV_CHECK(doc_lens_[doc] >= 0 && padded_lens_[doc] >= doc_lens_[doc], "document ", doc,
                      " has length ", doc_lens_[doc], " and padded length ", padded_lens_[doc],
                      "; lengths are not negative and padding only adds tokens");
    }
    const bool has_size = spec_.kind == QueryKind::kWindow || !is_self_attention();
    SPLITKV_CHECK(!has_size || spec_.size >= 1, "size=", spec_.size,
                  " of a query spec must be at least 1");
    if (spec_.kind == QueryKind::kAnchors) check_anchors(doc_lens_, spec_);
    if (spec_.kind == QueryKind::kPrefix) check_prefixes(doc_lens_, spec_);
    check_counts(doc_lens_, padded_lens_, spec_);
    kv_starts_ = prefix_sums(padded_lens_);
    if (spec_.kind == QueryKind::kAnchors) anchor_sums_ = prefix_sums(spec_.anchor_positions);
    std::vector<int64_t> rows(doc_lens_.size());
    for (size_t doc = 0; doc < rows.size(); ++doc) rows[doc] = count_rows(doc);
    row_starts_ = prefix_sums(rows);
}

bool QueryModel::is_self_attention() const {
    return spec_.kind != QueryKind::kSuffix && spec_.kind != QueryKind::kAnchors;
}

int64_t QueryModel::count_rows(int64_t doc) const {
    switch (spec_.kind) {
        case QueryKind::kSuffix:
            return std::min(spec_.size, doc_lens_[doc]);
        case QueryKind::kAnchors:
            return (spec_.anchor_ptr[doc + 1] - spec_.anchor_ptr[doc]) * spec_.size;
        default:
            return padded_lens_[doc];
    }
}

Range QueryModel::visible_keys(int64_t doc, int64_t row) const {
    const int64_t len = doc_lens_[doc];
    if (is_self_attention() && row >= len) return {0, 0};  // a pad
    switch (spec_.kind) {
        case QueryKind::kSuffix:
            return {0, len - num_rows(doc) + row + 1};
        case QueryKind::kAnchors:
            return {0, spec_.anchor_positions[spec_.anchor_ptr[doc] + row / spec_.size]};
        case QueryKind::kFull:
            return {0, len};
        case QueryKind::kWindow:
            return {std::max<int64_t>(0, row - spec_.size + 1), row + 1};
        case QueryKind::kPrefix:
            return {0, std::max(row + 1, spec_.anchor_positions[doc])};
        case QueryKind::kCausal:
            return {0, row + 1};
    }
    return {0, 0};
}

int64_t QueryModel::pairs_before(int64_t doc, int64_t x) const {
    const int64_t len = doc_lens_[doc];
    x = std::min(x, len);
    switch (spec_.kind) {
        case QueryKind::kCausal:
            return falling_sum(len, x);
        case QueryKind::kFull:
            return len * x;
        case QueryKind::kPrefix: {
            const int64_t flat = std::min(x, spec_.anchor_positions[doc]);
            return len * flat + falling_sum(len - flat, x - flat);
        }
        case QueryKind::kWindow:
        case QueryKind::kSuffix:
            return banded_pairs_before(len, spec_.size, x);
        case QueryKind::kAnchors: {
            const auto first = spec_.anchor_positions.begin();
            const int64_t end = spec_.anchor_ptr[doc + 1];
            const int64_t below =
                std::lower_bound(first + spec_.anchor_ptr[doc], first + end, x) - first;
            const int64_t near = anchor_sums_[below] - anchor_sums_[spec_.anchor_ptr[doc]];
            return spec_.size * (near + (end - below) * x);
        }
    }
    return 0;
}

Range QueryModel::rows_seeing(int64_t doc, Range keys) const {
    const int64_t len = doc_lens_[doc];
    keys.end = std::min(keys.end, len);
    if (keys.empty() || num_rows(doc) == 0) return {0, 0};
    switch (spec_.kind) {
        case QueryKind::kCausal:
            return {keys.begin, len};
        case QueryKind::kFull:
            return {0, len};
        case QueryKind::kPrefix:
            return {keys.begin < spec_.anchor_positions[doc] ? 0 : keys.begin, len};
        case QueryKind::kWindow:
            return {keys.begin, std::min(len, keys.end - 1 + std::min(spec_.size, len))};
        case QueryKind::kSuffix: {
            const int64_t first_position = len - num_rows(doc);
            return {std::max<int64_t>(0, keys.begin - first_position), num_rows(doc)};
        }
        case QueryKind::kAnchors: {
            const auto begin = spec_.anchor_positions.begin() + spec_.anchor_ptr[doc];
            const auto end = spec_.anchor_positions.begin() + spec_.anchor_ptr[doc + 1];
            const int64_t first = std::upper_bound(begin, end, keys.begin) - begin;
            return {first * spec_.size, num_rows(doc)};
        }
    }
    return {0, 0};
}

}  // namespace splitkv::planner
