#include "cuda/backward_work.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/check.h"
#include "cuda/backward_parts.h"
#include "cuda/row_tiles.h"
#include "cuda/sm80/tiles.h"

namespace splitkv::cuda {
namespace {

struct TileSize {
    int rows;
    int keys;
};

TileSize tile_of(const BackwardWorkRequest& request) {
    const auto head_dim_qk = static_cast<int>(request.head_dim_qk);
    const auto head_dim_v = static_cast<int>(request.head_dim_v);
    if (request.family == Family::kSm90) {
        const sm90::BackwardTile tile = sm90::backward_tile(head_dim_qk, head_dim_v);
        return {tile.rows, tile.keys};
    }
    const sm80::KeyTileSize tile = sm80::backward_tile(head_dim_qk, head_dim_v);
    return {tile.rows, tile.keys};
}

// KV tiles [begin, end) of a row tile that any of its rows sees, and those that all rows which see
// any key see whole.
struct Reach {
    int32_t begin;
    int32_t end;
    int32_t full_begin;
    int32_t full_end;
};

Reach reach_of(const RowTile& tile, int32_t keys) {
    Reach reach{};
    reach.begin = tile.min_begin / keys;
    reach.end = static_cast<int32_t>(num_key_tiles(0, tile.max_end, keys));
    reach.full_begin = static_cast<int32_t>(num_key_tiles(0, tile.max_begin, keys));
    reach.full_end = std::max(reach.full_begin, tile.min_end / keys);
    return reach;
}

BackwardCut make_cut(const BackwardWorkRequest& request, bool is_packed) {
    BackwardCut cut{};
    const TileSize size = tile_of(request);
    cut.tile_rows = size.rows;
    cut.tile_keys = size.keys;
    const int64_t group = request.num_heads_q / request.num_heads_kv;
    cut.heads_per_tile = is_packed ? group : 1;
    cut.tile_heads_per_kv_head = group / cut.heads_per_tile;
    cut.tiles =
        cut_row_tiles(request.kv_begin, request.kv_end, request.num_rows,
                      static_cast<int32_t>(cut.tile_rows / cut.heads_per_tile), cut.tile_keys);
    for (const RowTile& tile : cut.tiles) {
        const Reach reach = reach_of(tile, cut.tile_keys);
        cut.total_cost += (reach.end - reach.begin) * cut.tile_heads_per_kv_head;
    }
    return cut;
}

// Packing the heads of a group makes tiles of fewer query rows. It wins where whole tiles of one
// head would be half empty, or meet many keys that few of their rows see. A packed tile must be
// whole query rows, for each consumer on sm_90.
BackwardCut choose_packing(const BackwardWorkRequest& request) {
    const int64_t group = request.num_heads_q / request.num_heads_kv;
    BackwardCut plain = make_cut(request, false);
    const bool can_pack = request.family == Family::kSm90 ? sm90::kWarpgroupRows % group == 0
                                                          : group <= plain.tile_rows;
    if (group == 1 || !can_pack) return plain;
    BackwardCut packed = make_cut(request, true);
    constexpr double kWorthwhile = 0.98;  // equal costs favour whole rows of one head
    const bool is_cheaper = static_cast<double>(packed.total_cost) <
                            kWorthwhile * static_cast<double>(plain.total_cost);
    return is_cheaper ? packed : plain;
}

// Collects the segments of every KV tile while row tiles pass by in order. Only those KV tiles are
// touched whose need of the row tile differs from that of the row tile before.
class SegmentCollector {
  public:
    explicit SegmentCollector(int64_t num_kv_tiles)
        : runs_(num_kv_tiles), segments_(num_kv_tiles) {}

    void pass(int32_t row_tile, const Reach& reach) {
        update(row_tile, reach, previous_.begin, reach.begin);
        update(row_tile, reach, previous_.end, reach.end);
        update(row_tile, reach, previous_.full_begin, reach.full_begin);
        update(row_tile, reach, previous_.full_end, reach.full_end);
        previous_ = reach;
    }
    std::vector<BackwardSegments> finish(int32_t num_row_tiles) {
        pass(num_row_tiles, Reach{});
        return std::move(segments_);
    }

  private:
    enum class Need : int8_t { kNone, kMasked, kFull };
    struct Run {
        Need need;
        int32_t first_tile;
    };

    static Need need_of(const Reach& reach, int32_t kv_tile) {
        if (kv_tile >= reach.full_begin && kv_tile < reach.full_end) return Need::kFull;
        return kv_tile >= reach.begin && kv_tile < reach.end ? Need::kMasked : Need::kNone;
    }
    void update(int32_t row_tile, const Reach& reach, int32_t a, int32_t b) {
        for (int32_t kv_tile = std::min(a, b); kv_tile < std::max(a, b); ++kv_tile) {
            Run& run = runs_[static_cast<size_t>(kv_tile)];
            const Need need = need_of(reach, kv_tile);
            if (need == run.need) continue;
            if (run.need != Need::kNone && row_tile > run.first_tile) {
                segments_[static_cast<size_t>(kv_tile)].push_back(
                    {run.first_tile, row_tile - run.first_tile, run.need == Need::kMasked, 0});
            }
            run = {need, row_tile};
        }
    }

    Reach previous_{};
    std::vector<Run> runs_;
    std::vector<BackwardSegments> segments_;
};

// Appends steps [first, last) of the segments to those of the list.
void append_steps(const BackwardSegments& segments, int64_t first, int64_t last,
                  BackwardWork* work) {
    int64_t start = 0;
    for (const BackwardSegment& segment : segments) {
        const int64_t begin = std::max(first, start);
        const int64_t end = std::min(last, start + segment.num_tiles);
        if (begin < end) {
            work->segments.push_back({static_cast<int32_t>(segment.first_tile + begin - start),
                                      static_cast<int32_t>(end - begin), segment.is_masked, 0});
        }
        start += segment.num_tiles;
    }
}

// Appends an item with the steps of a part, the first `num_later` of them last.
void emit_part(const BackwardSegments& segments, const BackwardPart& part, int64_t num_later,
               BackwardItem item, BackwardWork* work) {
    item.segment_begin = static_cast<int32_t>(work->segments.size());
    item.num_steps = static_cast<int32_t>(part.last_step - part.first_step);
    append_steps(segments, part.first_step + num_later, part.last_step, work);
    append_steps(segments, part.first_step, part.first_step + num_later, work);
    item.num_segments = static_cast<int32_t>(work->segments.size()) - item.segment_begin;
    work->items.push_back(item);
}

// Band by band, and in each in the order of the KV tiles.
void emit_items(const std::vector<BackwardSegments>& segments, const BackwardParts& parts,
                BackwardWork* work) {
    std::vector<BackwardItem> next(segments.size());  // of each KV tile
    for (size_t kv_tile = 0; kv_tile < segments.size(); ++kv_tile) {
        BackwardItem& item = next[kv_tile];
        item.kv_tile = static_cast<int32_t>(kv_tile);
        item.num_parts = static_cast<int32_t>(parts.of_kv_tile[kv_tile].size());
        if (item.num_parts == 0) work->unseen_kv_tiles.push_back(item.kv_tile);
        if (item.num_parts > 1) {
            item.split = static_cast<int32_t>(work->split_kv_tiles.size());
            work->split_kv_tiles.push_back(item.kv_tile);
        }
    }
    for (int32_t band = 0; band < parts.num_bands; ++band) {
        int64_t num_before = 0;  // items of this band
        for (size_t kv_tile = 0; kv_tile < segments.size(); ++kv_tile) {
            BackwardItem& item = next[kv_tile];
            for (; item.part < item.num_parts; ++item.part) {
                const BackwardPart& part =
                    parts.of_kv_tile[kv_tile][static_cast<size_t>(item.part)];
                if (part.band != band) break;
                const int64_t num_later =
                    num_before++ * parts.stagger % (part.last_step - part.first_step);
                emit_part(segments[kv_tile], part, num_later, item, work);
            }
        }
    }
}

void check_request(const BackwardWorkRequest& request) {
    const bool is_sm90 = request.family == Family::kSm90;
    const bool has_kernel = is_sm90 ? sm90::has_backward(request.head_dim_qk, request.head_dim_v)
                                    : sm80::has_kernels(request.head_dim_qk, request.head_dim_v);
    SPLITKV_CHECK(has_kernel, "no CUDA kernel for the backward of head dims (", request.head_dim_qk,
                  ", ", request.head_dim_v,
                  "), needs (64, 64), (128, 128), (192, 128) or (256, 256)");
    check_intervals(request.kv_begin, request.kv_end, request.num_rows, request.num_keys);
    SPLITKV_CHECK(request.num_heads_kv >= 1 && request.num_heads_q % request.num_heads_kv == 0,
                  "num_heads_q=", request.num_heads_q,
                  " must be a multiple of num_heads_kv=", request.num_heads_kv);
}

// Whether one head may follow the other, its dearest items starting late: where all are alike, or,
// on sm_90, where the tile is so short that rows come and go twice as often for each product, so
// that misses of L2 cost more, and no item takes more than 1.5 times what the head gives each SM.
bool heads_may_follow(const BackwardWorkRequest& request, const std::vector<BackwardItem>& items) {
    int64_t least = items.front().num_steps, most = least, total = 0;
    for (const BackwardItem& item : items) {
        least = std::min<int64_t>(least, item.num_steps);
        most = std::max<int64_t>(most, item.num_steps);
        total += item.num_steps;
    }
    constexpr int kShortTile = 64;  // keys
    const bool is_short = request.family == Family::kSm90 && tile_of(request).keys <= kShortTile;
    return least * 5 >= most * 4 || (is_short && 2 * most * request.num_sms <= 3 * total);
}

// Whether neighbours in time should share the rows of one head, which L2 then holds, or the heads
// of one KV tile, whose keys and gradients lie side by side in memory.
bool is_head_major(const BackwardWorkRequest& request, const std::vector<BackwardItem>& items) {
    constexpr int64_t kHeldBytes = 24 << 20;  // half of the L2 of an H200
    return !items.empty() &&
           request.num_rows * request.num_heads_q * bytes_of_row(request) > kHeldBytes &&
           heads_may_follow(request, items);
}

// Dearest first, but only by powers of two: items of a class stay in the order of the keys, so that
// those that run together read the same rows.
void sort_by_cost(std::vector<BackwardItem>* items) {
    const auto class_of = [](int32_t num_steps) {
        int cost_class = 0;
        while (num_steps >>= 1) ++cost_class;
        return cost_class;
    };
    std::stable_sort(items->begin(), items->end(),
                     [&](const BackwardItem& a, const BackwardItem& b) {
                         return class_of(a.num_steps) > class_of(b.num_steps);
                     });
}

// The list of the sm_80 kernel for dq: like that of a forward, and its splits are summed.
void add_dq_list(const BackwardWorkRequest& request, BackwardWork* work) {
    ForwardWorkRequest rows{};
    rows.kv_begin = request.kv_begin;
    rows.kv_end = request.kv_end;
    rows.num_rows = request.num_rows;
    rows.num_keys = request.num_keys;
    rows.num_heads_q = request.num_heads_q;
    rows.num_heads_kv = request.num_heads_kv;
    rows.head_dim_qk = request.head_dim_qk;
    rows.head_dim_v = request.head_dim_v;
    rows.num_sms = request.num_sms;
    rows.family = request.family;
    rows.walk = RowWalk::kDq;
    ForwardWork list = build_forward_work(rows);
    work->shape.dq_heads_per_tile = list.shape.heads_per_tile;
    work->shape.num_dq_items = list.shape.num_items;
    work->shape.is_dq_head_major = list.shape.is_head_major;
    work->shape.num_dq_merge_rows = list.shape.num_merge_rows;
    work->shape.num_dq_part_rows = list.shape.num_part_rows;
    work->dq_items = std::move(list.items);
    work->dq_merge_rows = std::move(list.merge_rows);
}

}  // namespace

BackwardWork build_backward_work(const BackwardWorkRequest& request) {
    check_request(request);
    const BackwardCut cut = choose_packing(request);
    BackwardWork work{};
    SegmentCollector collector(num_key_tiles(0, request.num_keys, cut.tile_keys));
    const auto num_row_tiles = static_cast<int32_t>(cut.tiles.size());
    for (int32_t i = 0; i < num_row_tiles; ++i) {
        const RowTile& tile = cut.tiles[static_cast<size_t>(i)];
        const Reach reach = tile.sees_keys() ? reach_of(tile, cut.tile_keys) : Reach{};
        collector.pass(i, reach);
        work.row_tiles.push_back({tile.row_begin, tile.num_rows, reach.begin, 0});
    }
    const std::vector<BackwardSegments> segments = collector.finish(num_row_tiles);
    std::vector<int64_t> num_steps;
    for (const BackwardSegments& list : segments) {
        if (!list.empty()) num_steps.push_back(num_steps_of(list));
    }

    BackwardWorkShape& shape = work.shape;
    shape.num_rows = request.num_rows;
    shape.num_keys = request.num_keys;
    shape.num_heads_q = request.num_heads_q;
    shape.num_heads_kv = request.num_heads_kv;
    shape.head_dim_qk = request.head_dim_qk;
    shape.head_dim_v = request.head_dim_v;
    shape.family = static_cast<int64_t>(request.family);
    shape.heads_per_tile = cut.heads_per_tile;
    shape.num_row_tiles = num_row_tiles;
    // Then dq is seldom in L2 when it is added to. 15 visits gain 6 %, 64 lose 1 %.
    shape.prefetches_dq = has_few_visits(num_steps, num_row_tiles);
    shape.is_deterministic = request.is_deterministic;
    const BackwardParts parts = divide_steps(request, cut, segments, num_steps);
    emit_items(segments, parts, &work);
    shape.num_items = static_cast<int64_t>(work.items.size());
    shape.num_segments = static_cast<int64_t>(work.segments.size());
    shape.num_unseen_kv_tiles = static_cast<int64_t>(work.unseen_kv_tiles.size());
    shape.num_splits = static_cast<int64_t>(work.split_kv_tiles.size());
    if (request.family == Family::kSm80) add_dq_list(request, &work);
    // In deterministic mode the order of KV tiles is that of their turns at dq, and an item must
    // not be handed out before one that it waits for.
    const bool has_turns_at_dq = request.is_deterministic && request.family == Family::kSm90;
    if (parts.num_bands > 1) {
        shape.is_head_major = parts.is_head_major;
    } else if (!has_turns_at_dq) {
        sort_by_cost(&work.items);
        shape.is_head_major = is_head_major(request, work.items);
    }
    return work;
}

}  // namespace splitkv::cuda
