// Which keys each row tile sees: the unit of work of the forward and backward drivers.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/isa.h"

namespace splitkv::cpu {

// Row tiles of one call, dearest first, shared by all KV heads.
struct WorkList {
    struct Tile {
        int64_t first_lane;
        int32_t num_lanes;
        int64_t first_piece;
        int64_t num_pieces;
    };
    std::vector<Tile> tiles;    // every lane is in one tile, also lanes that see no key
    std::vector<Piece> pieces;  // turns count up along tiles
    int64_t num_key_tiles = 0;
    int64_t kv_heads = 0;

    // Work items are (tile, KV head), KV head fastest: neighbours in time differ in head.
    int64_t num_items() const { return static_cast<int64_t>(tiles.size()) * kv_heads; }
    RowTile item(int64_t index) const;
};

// Cost: one pass over the rows and the visible (row tile, KV tile) pairs; 12 bytes per pair.
WorkList build_work_list(const Rows& q, const Rows& k, const int32_t* kv_begin,
                         const int32_t* kv_end);

}  // namespace splitkv::cpu
