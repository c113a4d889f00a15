#include "cpu/work_list.h"

#include <algorithm>
#include <cassert>
#include <numeric>
#include <utility>

namespace splitkv::cpu {
namespace {

using Interval = std::pair<int32_t, int32_t>;

// The non-empty intervals of rows [row_begin, row_end), sorted and joined where they meet.
void unite_intervals(const int32_t* kv_begin, const int32_t* kv_end, int64_t row_begin,
                     int64_t row_end, std::vector<Interval>* united) {
    united->clear();
    for (int64_t row = row_begin; row < row_end; ++row) {
        if (kv_begin[row] < kv_end[row]) united->emplace_back(kv_begin[row], kv_end[row]);
    }
    std::sort(united->begin(), united->end());
    size_t last = 0;
    for (size_t i = 1; i < united->size(); ++i) {
        const Interval next = (*united)[i];
        if (next.first <= (*united)[last].second) {
            (*united)[last].second = std::max((*united)[last].second, next.second);
        } else {
            (*united)[++last] = next;
        }
    }
    if (!united->empty()) united->resize(last + 1);
}

int32_t end_of_key_tile(int32_t key) {
    return static_cast<int32_t>(
        std::min<int64_t>((key / kKeyTile + int64_t{1}) * kKeyTile, INT32_MAX));
}

}  // namespace

RowTile WorkList::item(int64_t index) const {
    const Tile& tile = tiles[static_cast<size_t>(index / kv_heads)];
    RowTile row_tile{};
    row_tile.first_lane = tile.first_lane;
    row_tile.num_lanes = tile.num_lanes;
    row_tile.kv_head = index % kv_heads;
    row_tile.pieces = pieces.data() + tile.first_piece;
    row_tile.num_pieces = tile.num_pieces;
    return row_tile;
}

WorkList build_work_list(const Rows& q, const Rows& k, const int32_t* kv_begin,
                         const int32_t* kv_end) {
    const int64_t group = q.heads / k.heads;
    const int64_t num_lanes = q.rows * group;
    WorkList work;
    work.kv_heads = k.heads;
    work.num_key_tiles = (k.rows + kKeyTile - 1) / kKeyTile;
    std::vector<int64_t> num_keys;
    std::vector<Interval> united;
    for (int64_t lane = 0; lane < num_lanes; lane += kRowTile) {
        WorkList::Tile tile{};
        tile.first_lane = lane;
        tile.num_lanes = static_cast<int32_t>(std::min<int64_t>(kRowTile, num_lanes - lane));
        tile.first_piece = static_cast<int64_t>(work.pieces.size());
        unite_intervals(kv_begin, kv_end, lane / group, (lane + tile.num_lanes - 1) / group + 1,
                        &united);
        int64_t keys = 0;
        for (const auto& [begin, end] : united) {
            keys += end - begin;
            for (int32_t key = begin; key < end;) {
                const int32_t stop = std::min(end, end_of_key_tile(key));
                // One turn counter orders the adds to a KV tile, so no piece may span two.
                assert(key / kKeyTile == (stop - 1) / kKeyTile);
                work.pieces.push_back({key, stop, 0});
                key = stop;
            }
        }
        tile.num_pieces = static_cast<int64_t>(work.pieces.size()) - tile.first_piece;
        work.tiles.push_back(tile);
        num_keys.push_back(keys);
    }

    std::vector<size_t> order(work.tiles.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return num_keys[a] > num_keys[b]; });
    std::vector<WorkList::Tile> sorted;
    sorted.reserve(order.size());
    std::vector<int32_t> next_turn(static_cast<size_t>(work.num_key_tiles), 0);
    for (const size_t index : order) {
        const WorkList::Tile& tile = work.tiles[index];
        sorted.push_back(tile);
        for (int64_t i = 0; i < tile.num_pieces; ++i) {
            Piece& piece = work.pieces[static_cast<size_t>(tile.first_piece + i)];
            piece.turn = next_turn[static_cast<size_t>(piece.key_begin / kKeyTile)]++;
        }
    }
    work.tiles = std::move(sorted);
    return work;
}

}  // namespace splitkv::cpu
