#include "cuda/row_tiles.h"

#include <algorithm>
#include <limits>

#include "common/check.h"

namespace splitkv::cuda {
namespace {

constexpr int32_t kMaxKey = std::numeric_limits<int32_t>::max();

RowTile start_tile(int32_t row) { return {row, 0, kMaxKey, 0, kMaxKey, 0}; }

RowTile close_tile(const RowTile& tile) {
    return tile.sees_keys() ? tile : RowTile{tile.row_begin, tile.num_rows, 0, 0, 0, 0};
}

}  // namespace

void check_intervals(const int32_t* kv_begin, const int32_t* kv_end, int64_t num_rows,
                     int64_t num_keys) {
    SPLITKV_CHECK(num_rows <= INT32_MAX && num_keys <= INT32_MAX,
                  "at most 2^31 - 1 rows and keys, got ", num_rows, " and ", num_keys);
    for (int64_t row = 0; row < num_rows; ++row) {
        const int32_t begin = kv_begin[row];
        const int32_t end = kv_end[row];
        SPLITKV_CHECK(begin >= end || (begin >= 0 && end <= num_keys), "row ", row, " sees keys [",
                      begin, ", ", end, "), needs a part of [0, ", num_keys, ")");
    }
}

std::vector<RowTile> cut_row_tiles(const int32_t* kv_begin, const int32_t* kv_end, int64_t num_rows,
                                   int32_t max_rows, int32_t key_tile) {
    // What a tile costs besides its keys, in key tiles: below this a cut does not pay.
    constexpr int64_t kTileOverhead = 1;
    std::vector<RowTile> tiles;
    tiles.reserve(static_cast<size_t>(num_rows / max_rows + 1));
    RowTile tile = start_tile(0);
    for (int32_t row = 0; row < num_rows; ++row) {
        const int32_t begin = kv_begin[row];
        const int32_t end = kv_end[row];
        const bool is_empty = begin >= end;
        bool is_cut = tile.num_rows == max_rows;
        if (!is_cut && !is_empty && tile.sees_keys()) {
            const int64_t joined = num_key_tiles(std::min(begin, tile.min_begin),
                                                 std::max(end, tile.max_end), key_tile);
            const int64_t apart = num_key_tiles(tile.min_begin, tile.max_end, key_tile) +
                                  num_key_tiles(begin, end, key_tile) + kTileOverhead;
            is_cut = joined > apart;
        }
        if (is_cut) {
            tiles.push_back(close_tile(tile));
            tile = start_tile(row);
        }
        ++tile.num_rows;
        if (is_empty) continue;
        tile.min_begin = std::min(tile.min_begin, begin);
        tile.max_begin = std::max(tile.max_begin, begin);
        tile.min_end = std::min(tile.min_end, end);
        tile.max_end = std::max(tile.max_end, end);
    }
    if (tile.num_rows > 0) tiles.push_back(close_tile(tile));
    return tiles;
}

}  // namespace splitkv::cuda
