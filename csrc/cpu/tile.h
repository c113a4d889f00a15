// What forward and backward tiles share: which lanes are alive, loading and storing lanes and keys,
// and which lanes a piece of keys concerns.
#pragma once

#include "cpu/simd.h"

namespace splitkv::cpu::SPLITKV_ISA {

// Walks the lanes of a tile as (query row, query head) without a division per lane.
struct LaneCursor {
    int64_t row;
    int64_t head_in_group;
    int64_t group;
    int64_t first_head;

    SPLITKV_INLINE LaneCursor start(const RowTile& tile, int64_t group) {
        return {tile.first_lane / group, tile.first_lane % group, group, tile.kv_head * group};
    }
    int64_t head() const { return first_head + head_in_group; }
    void advance() {
        if (++head_in_group == group) {
            head_in_group = 0;
            ++row;
        }
    }
};

SPLITKV_INLINE int round_up_to_lanes(int64_t n) {
    return static_cast<int>((n + kLanes - 1) / kLanes * kLanes);
}

SPLITKV_INLINE bool is_alive(const LaneScratch& lane, int i) { return lane.begin[i] < lane.end[i]; }

static inline void load_intervals(const int32_t* kv_begin, const int32_t* kv_end,
                                  const RowTile& tile, int64_t group, const LaneScratch& lane) {
    LaneCursor cursor = LaneCursor::start(tile, group);
    for (int i = 0; i < kRowTile; ++i) {
        lane.begin[i] = lane.end[i] = 0;
        if (i >= tile.num_lanes) continue;
        if (kv_begin[cursor.row] < kv_end[cursor.row]) {
            lane.begin[i] = kv_begin[cursor.row];
            lane.end[i] = kv_end[cursor.row];
        }
        cursor.advance();
    }
}

// rows[lane, :] = tensor[row, head, :]; zeros for dead lanes, whose memory may hold NaN, and to the
// right of dim up to the vector length.
static inline void load_lanes(const Rows& tensor, const RowTile& tile, int64_t group,
                              const LaneScratch& lane, int64_t stride, float* rows) {
    const int64_t width = round_up_to_lanes(tensor.dim);
    LaneCursor cursor = LaneCursor::start(tile, group);
    for (int i = 0; i < round_up_to_lanes(tile.num_lanes); ++i) {
        float* target = rows + i * stride;
        int64_t filled = 0;
        if (is_alive(lane, i)) {
            load_row(row_pointer(tensor, cursor.row, cursor.head()), tensor.dtype, tensor.dim,
                     target);
            filled = tensor.dim;
        }
        for (int64_t d = filled; d < width; ++d) target[d] = 0.0f;
        cursor.advance();
    }
}

// rows_t[d, lane] = rows[lane, d] * factor.
static inline void transpose_lanes(const float* rows, int64_t stride, int num_lanes, int64_t dim,
                                   float factor, float* rows_t) {
    for (int lane0 = 0; lane0 < num_lanes; lane0 += kLanes) {
        const float* source = rows + lane0 * stride;
        for (int64_t d = 0; d < dim; ++d) {
            float* target = rows_t + d * kLaneStride + lane0;
            for (int i = 0; i < kLanes; ++i) target[i] = source[i * stride + d] * factor;
        }
    }
}

// rows[lane, d] = rows_t[d, lane] * factor[lane].
static inline void untranspose_lanes(const float* rows_t, int num_lanes, int64_t dim,
                                     const float* factor, int64_t stride, float* rows) {
    for (int64_t d = 0; d < dim; ++d) {
        const float* source = rows_t + d * kLaneStride;
        for (int i = 0; i < num_lanes; ++i) rows[i * stride + d] = source[i] * factor[i];
    }
}

// tensor[row, head, :] = rows[lane, :], zeros for dead lanes.
static inline void store_lanes(float* rows, int64_t stride, const RowTile& tile, int64_t group,
                               const LaneScratch& lane, const Rows& tensor) {
    LaneCursor cursor = LaneCursor::start(tile, group);
    for (int i = 0; i < tile.num_lanes; ++i) {
        float* source = rows + i * stride;
        if (!is_alive(lane, i)) {
            for (int64_t d = 0; d < tensor.dim; ++d) source[d] = 0.0f;
        }
        store_row(source, tensor.dim, tensor.dtype, row_pointer(tensor, cursor.row, cursor.head()));
        cursor.advance();
    }
}

// Some lane of the tile sees each key of a piece, so no row that may hold garbage is ever read.
static inline void load_keys(const Rows& tensor, const Piece& piece, int64_t kv_head,
                             int64_t stride, float* target) {
    for (int64_t key = piece.key_begin; key < piece.key_end; ++key) {
        load_row(row_pointer(tensor, key, kv_head), tensor.dtype, tensor.dim, target);
        target += stride;
    }
}

// The vectors of lanes in which some lane sees a key of the piece.
struct LaneSpan {
    int begin;        // a multiple of kLanes
    int end;          // a multiple of kLanes
    bool needs_mask;  // some live lane in the span doesn't see all keys of the piece
};

static inline LaneSpan span_of_piece(const LaneScratch& lane, const Piece& piece) {
    int first = kRowTile;
    int last = -1;
    for (int i = 0; i < kRowTile; ++i) {
        if (lane.begin[i] < piece.key_end && lane.end[i] > piece.key_begin) {
            if (first == kRowTile) first = i;
            last = i;
        }
    }
    LaneSpan span{first / kLanes * kLanes, round_up_to_lanes(last + 1), false};
    for (int i = span.begin; i < span.end; ++i) {
        span.needs_mask |=
            is_alive(lane, i) && (lane.begin[i] > piece.key_begin || lane.end[i] < piece.key_end);
    }
    return span;
}

}  // namespace splitkv::cpu::SPLITKV_ISA
