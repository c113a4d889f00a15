// Who sees what: closed forms for the query rows of a pack of documents.
//
// Documents lie end to end in two streams. The KV stream has `padded_len` tokens a document, of
// which the first `len` are real; pads see nothing and are seen by nobody. The query stream has
// `num_rows(doc)` rows a document. For self-attention specs both streams are the same tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace splitkv::planner {

enum class QueryKind { kCausal, kWindow, kFull, kPrefix, kSuffix, kAnchors };

// Half-open range of KV positions or of query rows.
struct Range {
    int64_t begin;
    int64_t end;
    bool empty() const { return begin >= end; }
};

// Limit of tokens, rows, and rows times keys: sums and differences of a few of them stay in int64.
constexpr int64_t kMaxCount = (int64_t{1} << 61) - 1;

struct QuerySpec {
    QueryKind kind;
    int64_t size;  // window: keys a row sees; suffix: rows; anchors: rows an anchor
    std::vector<int64_t> anchor_ptr;        // anchors only: CSR over documents, [num_docs + 1]
    std::vector<int64_t> anchor_positions;  // anchors: ascending inside a document; prefix: its
                                            // length in each document, [num_docs]
};

// Sum of first + (first - 1) + ... over `count` terms.
inline int64_t falling_sum(int64_t first, int64_t count) {
    return count * first - count * (count - 1) / 2;
}

// All methods are exact in int64: the constructor throws for packs whose query rows times keys
// reach kMaxCount. Ranges are inside one document, counted from its first row or key.
class QueryModel {
  public:
    QueryModel(std::vector<int64_t> doc_lens, std::vector<int64_t> padded_lens, QuerySpec spec);

    int64_t num_docs() const { return static_cast<int64_t>(doc_lens_.size()); }
    int64_t len(int64_t doc) const { return doc_lens_[doc]; }
    int64_t padded_len(int64_t doc) const { return padded_lens_[doc]; }
    int64_t kv_start(int64_t doc) const { return kv_starts_[doc]; }
    int64_t row_start(int64_t doc) const { return row_starts_[doc]; }
    int64_t num_tokens() const { return kv_starts_.back(); }
    int64_t num_rows() const { return row_starts_.back(); }
    int64_t num_rows(int64_t doc) const { return row_starts_[doc + 1] - row_starts_[doc]; }
    bool is_self_attention() const;

    // KV positions that query row `row` of `doc` sees.
    Range visible_keys(int64_t doc, int64_t row) const;
    // Number of visible (row, key) pairs of `doc` whose key lies before position `x`.
    int64_t pairs_before(int64_t doc, int64_t x) const;
    // Visible pairs whose key lies in `keys`: the cost of a KV block.
    int64_t pairs_in(int64_t doc, Range keys) const {
        if (spec_.kind == QueryKind::kCausal) {
            const int64_t len = doc_lens_[doc];
            const int64_t begin = std::min(keys.begin, len), end = std::min(keys.end, len);
            return falling_sum(len - begin, end - begin);
        }
        return pairs_before(doc, keys.end) - pairs_before(doc, keys.begin);
    }
    // Query rows of `doc` that see at least one key of `keys` (one range, for every spec).
    Range rows_seeing(int64_t doc, Range keys) const;

  private:
    int64_t count_rows(int64_t doc) const;

    std::vector<int64_t> doc_lens_;     // [num_docs]
    std::vector<int64_t> padded_lens_;  // [num_docs]
    QuerySpec spec_;
    std::vector<int64_t> kv_starts_;    // [num_docs + 1]
    std::vector<int64_t> row_starts_;   // [num_docs + 1]
    std::vector<int64_t> anchor_sums_;  // [num_anchors + 1], prefix sums of anchor_positions
};

}  // namespace splitkv::planner
