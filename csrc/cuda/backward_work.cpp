#include "cuda/backward_work.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "common/check.h"
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

// One way to cut the rows: the heads that share a tile, and the tiles.
struct Cut {
    TileSize size;
    int64_t heads_per_tile;
    int64_t tile_heads_per_kv_head;
    std::vector<RowTile> tiles;
    int64_t total_cost;  // steps, over all heads
};

Cut make_cut(const BackwardWorkRequest& request, bool is_packed) {
    Cut cut{};
    cut.size = tile_of(request);
    const int64_t group = request.num_heads_q / request.num_heads_kv;
    cut.heads_per_tile = is_packed ? group : 1;
    cut.tile_heads_per_kv_head = group / cut.heads_per_tile;
    cut.tiles =
        cut_row_tiles(request.kv_begin, request.kv_end, request.num_rows,
                      static_cast<int32_t>(cut.size.rows / cut.heads_per_tile), cut.size.keys);
    for (const RowTile& tile : cut.tiles) {
        const Reach reach = reach_of(tile, cut.size.keys);
        cut.total_cost += (reach.end - reach.begin) * cut.tile_heads_per_kv_head;
    }
    return cut;
}

// Packing the heads of a group makes tiles of fewer query rows. It wins where whole tiles of one
// head would be half empty, or meet many keys that few of their rows see. A packed tile must be
// whole query rows, for each consumer on sm_90.
Cut choose_packing(const BackwardWorkRequest& request) {
    const int64_t group = request.num_heads_q / request.num_heads_kv;
    Cut plain = make_cut(request, false);
    const bool can_pack = request.family == Family::kSm90 ? sm90::kWarpgroupRows % group == 0
                                                          : group <= plain.size.rows;
    if (group == 1 || !can_pack) return plain;
    Cut packed = make_cut(request, true);
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
    std::vector<std::vector<BackwardSegment>> finish(int32_t num_row_tiles) {
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
    std::vector<std::vector<BackwardSegment>> segments_;
};

int64_t num_steps_of(const std::vector<BackwardSegment>& segments) {
    int64_t steps = 0;
    for (const BackwardSegment& segment : segments) steps += segment.num_tiles;
    return steps;
}

// Microseconds of a call whose KV tiles are cut into parts of at most max_steps steps.
class CostModel {
  public:
    CostModel(const BackwardWorkRequest& request, const Cut& cut,
              const std::vector<int64_t>& num_steps)
        : request_(request), num_steps_(num_steps) {
        // 570 TFLOP/s over 132 SMs; 130 over the 108 of an A100.
        const double flops_per_us = request.family == Family::kSm90 ? 4.3e6 : 1.2e6;
        const double dims = 3.0 * static_cast<double>(request.head_dim_qk) +
                            2.0 * static_cast<double>(request.head_dim_v);
        step_us_ = 2.0 * cut.size.rows * cut.size.keys * dims / flops_per_us *
                   static_cast<double>(cut.tile_heads_per_kv_head);
    }

    // Longest first onto the SM that is free first, as the kernel's counter hands items out.
    double microseconds(int64_t max_steps) const {
        constexpr double kItemUs = 5.0;  // keys loaded, gradients added; nothing hides them
        constexpr double kTurnUs = 3.0;  // parts of a KV tile end together and add one by one
        std::vector<int64_t> parts;
        int64_t most_parts = 1;
        for (const int64_t steps : num_steps_) {
            const int64_t num_parts = (steps + max_steps - 1) / max_steps;
            most_parts = std::max(most_parts, num_parts);
            for (int64_t i = 0; i < num_parts; ++i) parts.push_back((steps + i) / num_parts);
        }
        std::sort(parts.begin(), parts.end(), std::greater<>());
        std::priority_queue<double, std::vector<double>, std::greater<>> free_at;
        for (int32_t sm = 0; sm < request_.num_sms; ++sm) free_at.push(0.0);
        double last = 0.0;
        for (const int64_t steps : parts) {
            for (int64_t head = 0; head < request_.num_heads_kv; ++head) {
                const double end = free_at.top() + static_cast<double>(steps) * step_us_ + kItemUs;
                free_at.pop();
                free_at.push(end);
                last = std::max(last, end);
            }
        }
        return last + static_cast<double>(most_parts - 1) * kTurnUs;
    }

  private:
    const BackwardWorkRequest& request_;
    const std::vector<int64_t>& num_steps_;
    double step_us_;
};

// The most steps that one item may have: those of the dearest KV tile where splitting does not pay.
int64_t choose_max_steps(const BackwardWorkRequest& request, const Cut& cut,
                         const std::vector<int64_t>& num_steps) {
    int64_t dearest = 1;
    int64_t total = 0;
    for (const int64_t steps : num_steps) {
        dearest = std::max(dearest, steps);
        total += steps * request.num_heads_kv;
    }
    constexpr int64_t kManyWaves = 8;  // beyond this a split has nothing to even out
    if (dearest * request.num_sms * kManyWaves <= total) return dearest;
    // Items run at speeds that differ by up to a third, for what they find in L2. One that takes
    // more than a quarter of an SM's share, but not all of it, would end last.
    constexpr int64_t kItemsPerSm = 4;
    const int64_t share = total / request.num_sms;
    if (dearest <= share && dearest * kItemsPerSm > share) {
        return std::max<int64_t>(1, share / kItemsPerSm);
    }
    const CostModel model(request, cut, num_steps);
    int64_t best = dearest;
    double best_us = model.microseconds(dearest);
    constexpr double kWorthwhile = 0.97;
    for (const int64_t num_parts : {2, 3, 4, 6, 8, 12, 16, 24, 32, 48}) {
        const int64_t max_steps = (dearest + num_parts - 1) / num_parts;
        const double us = model.microseconds(max_steps);
        if (us < kWorthwhile * best_us) {
            best_us = us;
            best = max_steps;
        }
    }
    return best;
}

// Appends steps [first, last) of the segments to the list, as the part of an item.
void emit_part(const std::vector<BackwardSegment>& segments, int64_t first, int64_t last,
               BackwardItem item, BackwardWork* work) {
    item.segment_begin = static_cast<int32_t>(work->segments.size());
    item.num_steps = static_cast<int32_t>(last - first);
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
    item.num_segments = static_cast<int32_t>(work->segments.size()) - item.segment_begin;
    work->items.push_back(item);
}

void emit_items(const std::vector<std::vector<BackwardSegment>>& segments, int64_t max_steps,
                BackwardWork* work) {
    for (size_t kv_tile = 0; kv_tile < segments.size(); ++kv_tile) {
        const int64_t steps = num_steps_of(segments[kv_tile]);
        if (steps == 0) {
            work->unseen_kv_tiles.push_back(static_cast<int32_t>(kv_tile));
            continue;
        }
        const int64_t num_parts = (steps + max_steps - 1) / max_steps;
        BackwardItem item{};
        item.kv_tile = static_cast<int32_t>(kv_tile);
        item.num_parts = static_cast<int32_t>(num_parts);
        if (num_parts > 1) item.split = static_cast<int32_t>(work->shape.num_splits++);
        // Longer parts first: a later one must not be handed out before an earlier one.
        int64_t first = 0;
        for (int64_t part = 0; part < num_parts; ++part) {
            const int64_t last = first + (steps + num_parts - 1 - part) / num_parts;
            item.part = static_cast<int32_t>(part);
            emit_part(segments[kv_tile], first, last, item, work);
            first = last;
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
    constexpr int64_t kRowBytes = 2 + 4;      // q or dout, and dq in fp32
    const int64_t row_bytes = request.head_dim_qk * kRowBytes + request.head_dim_v * 2;
    return !items.empty() && request.num_rows * request.num_heads_q * row_bytes > kHeldBytes &&
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

// Whether dq is seldom in L2 when it is added to: the first of its KV tiles finds it in memory.
bool prefetches_dq(const std::vector<int64_t>& num_steps, int64_t num_row_tiles) {
    constexpr int64_t kFewVisits = 32;  // of a row tile; 15 gain 6 %, 64 lose 1 %
    int64_t visits = 0;
    for (const int64_t steps : num_steps) visits += steps;
    return visits < kFewVisits * num_row_tiles;
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
    const Cut cut = choose_packing(request);
    BackwardWork work{};
    SegmentCollector collector(num_key_tiles(0, request.num_keys, cut.size.keys));
    const auto num_row_tiles = static_cast<int32_t>(cut.tiles.size());
    for (int32_t i = 0; i < num_row_tiles; ++i) {
        const RowTile& tile = cut.tiles[static_cast<size_t>(i)];
        const Reach reach = tile.sees_keys() ? reach_of(tile, cut.size.keys) : Reach{};
        collector.pass(i, reach);
        work.row_tiles.push_back({tile.row_begin, tile.num_rows, reach.begin, 0});
    }
    const std::vector<std::vector<BackwardSegment>> segments = collector.finish(num_row_tiles);
    std::vector<int64_t> num_steps;
    for (const auto& list : segments) {
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
    shape.prefetches_dq = prefetches_dq(num_steps, num_row_tiles);
    shape.is_deterministic = request.is_deterministic;
    emit_items(segments, choose_max_steps(request, cut, num_steps), &work);
    shape.num_items = static_cast<int64_t>(work.items.size());
    shape.num_segments = static_cast<int64_t>(work.segments.size());
    shape.num_unseen_kv_tiles = static_cast<int64_t>(work.unseen_kv_tiles.size());
    if (request.family == Family::kSm80) add_dq_list(request, &work);
    // In deterministic mode the order of KV tiles is that of their turns at dq, and an item must
    // not be handed out before one that it waits for.
    const bool has_turns_at_dq = request.is_deterministic && request.family == Family::kSm90;
    if (!has_turns_at_dq) {
        sort_by_cost(&work.items);
        shape.is_head_major = is_head_major(request, work.items);
    }
    return work;
}

}  // namespace splitkv::cuda
