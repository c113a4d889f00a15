#include "cuda/forward_work.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <vector>

#include "common/check.h"
#include "cuda/row_tiles.h"
#include "cuda/sm80/tiles.h"

namespace splitkv::cuda {
namespace {

using sm90::TileKind;

struct TileSize {
    int rows;
    int keys;
};

TileSize tile_of(const ForwardWorkRequest& request, TileKind kind) {
    const auto head_dim_qk = static_cast<int>(request.head_dim_qk);
    const auto head_dim_v = static_cast<int>(request.head_dim_v);
    if (request.family == Family::kSm90) {
        const sm90::ForwardTile tile = sm90::forward_tile(head_dim_qk, head_dim_v, kind);
        return {tile.rows, tile.keys};
    }
    const sm80::RowTileSize tile = request.walk == RowWalk::kDq
                                       ? sm80::dq_tile(head_dim_qk, head_dim_v)
                                       : sm80::forward_tile(head_dim_qk, head_dim_v);
    return {tile.rows, tile.keys};
}

bool has_tile_kind(const ForwardWorkRequest& request, TileKind kind) {
    return request.family == Family::kSm90 &&
           sm90::has_tile_kind(static_cast<int>(request.head_dim_qk),
                               static_cast<int>(request.head_dim_v), kind);
}

// CTAs that run at once: two of the small ones of sm_80 share an SM, on most cards.
int64_t num_slots(const ForwardWorkRequest& request) {
    return request.family == Family::kSm90 ? request.num_sms : 2 * int64_t{request.num_sms};
}

// One way to cut the rows: the tile sizes, the heads that share a tile, and the tiles.
struct Cut {
    TileKind kind;
    TileSize size;
    int64_t heads_per_tile;
    int64_t num_heads;  // times that each tile is done
    std::vector<RowTile> tiles;
    int64_t total_cost;  // key tiles, over all heads
    int64_t max_cost;    // key tiles of the dearest row tile
};

int64_t cost_of(const RowTile& tile, const TileSize& size) {
    return num_key_tiles(tile.min_begin, tile.max_end, size.keys);
}

Cut make_cut(const ForwardWorkRequest& request, TileKind kind, bool is_packed) {
    Cut cut{};
    cut.kind = kind;
    cut.size = tile_of(request, kind);
    cut.heads_per_tile = is_packed ? request.num_heads_q / request.num_heads_kv : 1;
    cut.num_heads = request.num_heads_q / cut.heads_per_tile;
    cut.tiles =
        cut_row_tiles(request.kv_begin, request.kv_end, request.num_rows,
                      static_cast<int32_t>(cut.size.rows / cut.heads_per_tile), cut.size.keys);
    for (const RowTile& tile : cut.tiles) {
        const int64_t cost = cost_of(tile, cut.size);
        cut.total_cost += cost * cut.num_heads;
        cut.max_cost = std::max(cut.max_cost, cost);
    }
    return cut;
}

// Packing the heads of a group makes tiles of fewer query rows. It wins where whole tiles of one
// head would be half empty, walk over keys that few of their rows see, or be too few for the GPU.
Cut choose_packing(const ForwardWorkRequest& request, TileKind kind) {
    const int64_t group = request.num_heads_q / request.num_heads_kv;
    Cut plain = make_cut(request, kind, false);
    if (group == 1 || group > plain.size.rows) return plain;
    Cut packed = make_cut(request, kind, true);
    const int64_t num_plain_items = static_cast<int64_t>(plain.tiles.size()) * plain.num_heads;
    constexpr int64_t kFewWaves = 2;
    constexpr double kWorthwhile = 0.98;  // of the cost; equal costs favour whole rows of one head
    const bool is_cheaper = static_cast<double>(packed.total_cost) <
                            kWorthwhile * static_cast<double>(plain.total_cost);
    return is_cheaper || num_plain_items < kFewWaves * num_slots(request) ? packed : plain;
}

void classify(const RowTile& tile, int32_t key_tile, ForwardItem* item) {
    item->num_tiles = static_cast<int32_t>(num_key_tiles(tile.min_begin, tile.max_end, key_tile));
    item->full_begin =
        static_cast<int32_t>(num_key_tiles(tile.min_begin, tile.max_begin, key_tile));
    const int32_t full_end = (tile.min_end - tile.min_begin) / key_tile;
    item->full_end = std::max(item->full_begin, full_end);
}

// Keys that the row tiles walk over, weighted by how long a key takes with tiles of this kind.
double weighted_keys(const Cut& cut) {
    // Longer key tiles hide more of the softmax: 2 to 3.5 % per key at 16K and 32K causal.
    const double weight = cut.kind == TileKind::kInterior ? 0.975 : 1.0;
    return weight * static_cast<double>(cut.total_cost * cut.size.keys);
}

Cut choose_cut(const ForwardWorkRequest& request) {
    const int64_t group = request.num_heads_q / request.num_heads_kv;
    if (has_tile_kind(request, TileKind::kShort) &&
        request.num_rows * group <= tile_of(request, TileKind::kShort).rows) {
        return make_cut(request, TileKind::kShort, true);
    }
    Cut edge = choose_packing(request, TileKind::kEdge);
    if (!has_tile_kind(request, TileKind::kInterior)) return edge;
    Cut interior = choose_packing(request, TileKind::kInterior);
    return weighted_keys(interior) < weighted_keys(edge) ? interior : edge;
}

// Microseconds of a call whose row tiles are cut into pieces of at most max_tiles key tiles.
class CostModel {
  public:
    CostModel(const ForwardWorkRequest& request, const Cut& cut) : request_(request), cut_(cut) {
        // 690 TFLOP/s over 132 SMs; 170 over the 108 of an A100, which two CTAs share.
        const double flops_per_us = request.family == Family::kSm90 ? 5.2e6 : 0.8e6;
        const double dims = static_cast<double>(request.head_dim_qk + request.head_dim_v);
        tile_us_ = 2.0 * cut.size.rows * cut.size.keys * dims / flops_per_us;
    }

    double microseconds(int64_t max_tiles) const {
        constexpr double kItemUs = 2.0;         // start and end of an item that nothing hides
        constexpr double kMergeLaunchUs = 3.0;  // one more kernel
        constexpr double kBytesPerUs = 3.5e6;   // of the merge, a pure copy
        std::vector<int64_t> pieces;
        int64_t part_rows = 0;
        for (const RowTile& tile : cut_.tiles) {
            const int64_t cost = cost_of(tile, cut_.size);
            const int64_t num_pieces = std::max<int64_t>(1, (cost + max_tiles - 1) / max_tiles);
            pieces.insert(pieces.end(), static_cast<size_t>(num_pieces),
                          (cost + num_pieces - 1) / num_pieces);
            if (num_pieces > 1) part_rows += num_pieces * tile.num_rows;
        }
        const double part_bytes =
            static_cast<double>(part_rows * request_.num_heads_q * request_.head_dim_v) *
            sizeof(float);
        const double merge_us =
            part_rows == 0 ? 0.0 : kMergeLaunchUs + 2.0 * part_bytes / kBytesPerUs;
        return makespan(&pieces, kItemUs) + merge_us;
    }

  private:
    // Longest first onto the slot that is free first, as the kernel's counter hands items out.
    double makespan(std::vector<int64_t>* pieces, double item_us) const {
        std::sort(pieces->begin(), pieces->end(), std::greater<>());
        std::priority_queue<double, std::vector<double>, std::greater<>> free_at;
        for (int64_t i = 0; i < num_slots(request_); ++i) free_at.push(0.0);
        double last = 0.0;
        for (const int64_t piece : *pieces) {
            const double cost = static_cast<double>(piece) * tile_us_ + item_us;
            for (int64_t head = 0; head < cut_.num_heads; ++head) {
                const double end = free_at.top() + cost;
                free_at.pop();
                free_at.push(end);
                last = std::max(last, end);
            }
        }
        return last;
    }

    const ForwardWorkRequest& request_;
    const Cut& cut_;
    double tile_us_;
};

int64_t num_items_at(const Cut& cut, int64_t max_tiles) {
    int64_t num_items = 0;
    for (const RowTile& tile : cut.tiles) {
        num_items += std::max<int64_t>(1, (cost_of(tile, cut.size) + max_tiles - 1) / max_tiles);
    }
    return num_items * cut.num_heads;
}

// The longest run of key tiles that one item may have: max_cost where splitting does not pay.
int64_t choose_max_tiles(const ForwardWorkRequest& request, const Cut& cut) {
    constexpr int64_t kManyWaves = 8;  // beyond this many items a split has nothing to even out,
    const int64_t num_items = static_cast<int64_t>(cut.tiles.size()) * cut.num_heads;
    const bool is_even = cut.max_cost * num_slots(request) * 2 <= cut.total_cost;
    if (cut.max_cost <= 1 || (num_items >= kManyWaves * num_slots(request) && is_even)) {
        return std::max<int64_t>(1, cut.max_cost);
    }
    const CostModel model(request, cut);
    int64_t best = cut.max_cost;
    double best_us = model.microseconds(best);
    constexpr double kWorthwhile = 0.97;
    constexpr int kMaxWaves = 4;
    for (int waves = 1; waves <= kMaxWaves; ++waves) {
        // The shortest runs that make at most this many waves of items.
        int64_t low = 1;
        int64_t high = cut.max_cost;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (num_items_at(cut, middle) <= waves * num_slots(request)) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        const double us = model.microseconds(low);
        if (us < kWorthwhile * best_us) {
            best_us = us;
            best = low;
        }
    }
    return best;
}

void emit_items(const RowTile& tile, const Cut& cut, int64_t max_tiles, ForwardWork* work) {
    ForwardItem whole{};
    whole.row_begin = tile.row_begin;
    whole.num_rows = tile.num_rows;
    whole.key_begin = tile.min_begin;
    whole.part_row = -1;
    classify(tile, cut.size.keys, &whole);
    const int64_t num_pieces = std::max<int64_t>(1, (whole.num_tiles + max_tiles - 1) / max_tiles);
    if (num_pieces == 1) {
        work->items.push_back(whole);
        return;
    }
    const int64_t first_part = work->shape.num_part_rows;
    for (int64_t piece = 0; piece < num_pieces; ++piece) {
        const auto first = static_cast<int32_t>(whole.num_tiles * piece / num_pieces);
        const auto last = static_cast<int32_t>(whole.num_tiles * (piece + 1) / num_pieces);
        ForwardItem item = whole;
        item.key_begin = whole.key_begin + first * cut.size.keys;
        item.num_tiles = last - first;
        item.full_begin = std::clamp(whole.full_begin, first, last) - first;
        item.full_end = std::clamp(whole.full_end, first, last) - first;
        item.part_row = static_cast<int32_t>(work->shape.num_part_rows);
        work->shape.num_part_rows += tile.num_rows;
        work->items.push_back(item);
    }
    for (int32_t i = 0; i < tile.num_rows; ++i) {
        work->merge_rows.push_back({tile.row_begin + i, static_cast<int32_t>(first_part + i),
                                    static_cast<int32_t>(num_pieces), tile.num_rows});
    }
}

void check_request(const ForwardWorkRequest& request) {
    const bool has_kernel = request.family == Family::kSm90
                                ? sm90::has_forward(request.head_dim_qk, request.head_dim_v)
                                : sm80::has_kernels(request.head_dim_qk, request.head_dim_v);
    SPLITKV_CHECK(has_kernel, "no CUDA kernel for head dims (", request.head_dim_qk, ", ",
                  request.head_dim_v, "), needs (64, 64), (128, 128), (192, 128) or (256, 256)");
    SPLITKV_CHECK(request.num_heads_kv >= 1 && request.num_heads_q % request.num_heads_kv == 0,
                  "num_heads_q=", request.num_heads_q,
                  " must be a multiple of num_heads_kv=", request.num_heads_kv);
    check_intervals(request.kv_begin, request.kv_end, request.num_rows, request.num_keys);
}

}  // namespace

ForwardWork build_forward_work(const ForwardWorkRequest& request) {
    check_request(request);
    const Cut cut = choose_cut(request);
    const int64_t max_tiles = choose_max_tiles(request, cut);
    ForwardWork work{};
    ForwardWorkShape& shape = work.shape;
    shape.num_rows = request.num_rows;
    shape.num_keys = request.num_keys;
    shape.num_heads_q = request.num_heads_q;
    shape.num_heads_kv = request.num_heads_kv;
    shape.head_dim_qk = request.head_dim_qk;
    shape.head_dim_v = request.head_dim_v;
    shape.family = static_cast<int64_t>(request.family);
    shape.kind = static_cast<int64_t>(cut.kind);
    shape.heads_per_tile = cut.heads_per_tile;
    for (const RowTile& tile : cut.tiles) emit_items(tile, cut, max_tiles, &work);
    std::stable_sort(
        work.items.begin(), work.items.end(),
        [](const ForwardItem& a, const ForwardItem& b) { return a.num_tiles > b.num_tiles; });
    // Equal items: neighbours in time share the keys of one head, which L2 then holds.
    shape.is_head_major =
        !work.items.empty() && work.items.back().num_tiles * 5 >= work.items.front().num_tiles * 4;
    shape.num_items = static_cast<int64_t>(work.items.size());
    shape.num_merge_rows = static_cast<int64_t>(work.merge_rows.size());
    return work;
}

}  // namespace splitkv::cuda
