// Cutting the query rows of one call into tiles, by the keys that they see. Host code, no CUDA.
#pragma once

#include <cstdint>
#include <vector>

namespace splitkv::cuda {

// Consecutive query rows and the extremes of the key intervals of those that see any key.
struct RowTile {
    int32_t row_begin;
    int32_t num_rows;
    int32_t min_begin;  // all four are 0 if no row of the tile sees a key
    int32_t max_begin;
    int32_t min_end;
    int32_t max_end;

    bool sees_keys() const { return min_begin < max_end; }
};

// Key tiles of `key_tile` rows that cover [begin, end), counted from begin.
constexpr int64_t num_key_tiles(int64_t begin, int64_t end, int64_t key_tile) {
    return end > begin ? (end - begin + key_tile - 1) / key_tile : 0;
}

// Throws std::invalid_argument when an interval leaves [0, num_keys).
void check_intervals(const int32_t* kv_begin, const int32_t* kv_end, int64_t num_rows,
                     int64_t num_keys);

// Tiles of at most max_rows rows that cover every row once, in order. A tile also ends where going
// on would make it walk over keys that none of its rows sees: where documents part.
std::vector<RowTile> cut_row_tiles(const int32_t* kv_begin, const int32_t* kv_end, int64_t num_rows,
                                   int32_t max_rows, int32_t key_tile);

}  // namespace splitkv::cuda
