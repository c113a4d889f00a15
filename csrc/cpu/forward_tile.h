// Forward of one row tile: online softmax over the pieces of keys that the tile sees.
//
//   q_t [D, lanes]                       once, scaled to log2 units
//   for each piece of keys:
//     scores_t = K . q_t                 [keys, lanes]
//     probs_t  = exp2(scores_t - max)    column by column: max and sum need no shuffles
//     out_t    = out_t * exp2(old max - new max) + V^T . probs_t      [Dv, lanes]
//   out = out_t^T / sum, lse = max + log(sum)
//
// Lanes are query rows, so a NaN in one row stays in its lane.
#pragma once

#include "cpu/gemm.h"
#include "cpu/tile.h"

namespace splitkv::cpu::SPLITKV_ISA {

// Sets hidden scores of one vector of lanes to -inf.
static inline void mask_scores(const LaneScratch& lane, const Piece& piece, int column,
                               float* scores_t) {
    const Ints begin = load(lane.begin + column);
    const Ints end = load(lane.end + column);
    for (int32_t key = piece.key_begin; key < piece.key_end; ++key) {
        float* score = scores_t + (key - piece.key_begin) * kLaneStride + column;
        const Ints index = broadcast(key);
        store(score, ((begin <= index) & (index < end)) ? load(score) : broadcast(-kInfinity));
    }
}

// Turns the scores of one vector of lanes into probabilities; updates max, sum and factor.
static inline void softmax_column(const LaneScratch& lane, int num_keys, int column,
                                  float* scores_t) {
    float* scores = scores_t + column;
    const Floats old_max = load(lane.max + column);
    Floats new_max = old_max;
    for (int key = 0; key < num_keys; ++key) {
        new_max = maximum(load(scores + key * kLaneStride), new_max);
    }
    const Floats shift = finite_shift(new_max);
    const Floats factor = exp2(old_max - shift);
    Floats sum = load(lane.sum + column) * factor;
    for (int key = 0; key < num_keys; ++key) {
        const Floats p = exp2(load(scores + key * kLaneStride) - shift);
        store(scores + key * kLaneStride, p);
        sum += p;
    }
    store(lane.max + column, new_max);
    store(lane.sum + column, sum);
    store(lane.factor + column, factor);
}

static inline void forward_piece(const ForwardParams& params, const RowTile& tile,
                                 const Piece& piece, const TileScratch& s) {
    const LaneSpan span = span_of_piece(s.lane, piece);
    const int num_keys = piece.key_end - piece.key_begin;
    load_keys(params.k, piece, tile.kv_head, s.dim_stride, s.keys);
    load_keys(params.v, piece, tile.kv_head, s.dim_stride, s.values);

    Gemm scores{};
    scores.a = s.keys;
    scores.lda = s.dim_stride;
    scores.b = s.q_t + span.begin;
    scores.ldb = kLaneStride;
    scores.c = s.probs_t + span.begin;
    scores.ldc = kLaneStride;
    scores.m = num_keys;
    scores.n = span.end - span.begin;
    scores.k = static_cast<int>(params.k.dim);
    gemm<false>(scores);

    for (int column = span.begin; column < span.end; column += kLanes) {
        if (span.needs_mask) mask_scores(s.lane, piece, column, s.probs_t);
        softmax_column(s.lane, num_keys, column, s.probs_t);
    }

    Gemm out{};
    out.a = s.values;
    out.lda = s.dim_stride;
    out.b = s.probs_t + span.begin;
    out.ldb = kLaneStride;
    out.c = s.acc_t + span.begin;
    out.ldc = kLaneStride;
    out.m = static_cast<int>(params.v.dim);
    out.n = span.end - span.begin;
    out.k = num_keys;
    out.scale = s.lane.factor + span.begin;
    gemm<true>(out);
}

static void forward_tile(const ForwardParams& params, const RowTile& tile, const TileScratch& s) {
    const int64_t group = params.q.heads / params.k.heads;
    const int lanes = round_up_to_lanes(tile.num_lanes);
    load_intervals(params.kv_begin, params.kv_end, tile, group, s.lane);
    if (tile.num_pieces > 0) {
        load_lanes(params.q, tile, group, s.lane, s.dim_stride, s.rows);
        transpose_lanes(s.rows, s.dim_stride, lanes, params.q.dim, params.softmax_scale * kLog2E,
                        s.q_t);
    }
    for (int i = 0; i < kRowTile; ++i) {
        s.lane.max[i] = -kInfinity;
        s.lane.sum[i] = 0.0f;
    }
    for (int64_t d = 0; d < params.v.dim; ++d) {
        for (int i = 0; i < lanes; ++i) s.acc_t[d * kLaneStride + i] = 0.0f;
    }
    for (int64_t i = 0; i < tile.num_pieces; ++i) forward_piece(params, tile, tile.pieces[i], s);

    LaneCursor cursor = LaneCursor::start(tile, group);
    for (int i = 0; i < tile.num_lanes; ++i) {
        // sum is 0 for a dead lane, and for a live one whose every score is -inf.
        const float sum = s.lane.sum[i];
        const bool is_empty = !is_alive(s.lane, i) || sum == 0.0f;
        s.lane.factor[i] = is_empty ? 0.0f : 1.0f / sum;
        const float lse = (s.lane.max[i] + __builtin_log2f(sum)) * kLn2;
        *float_pointer(params.lse, cursor.row, cursor.head()) = is_empty ? -kInfinity : lse;
        cursor.advance();
    }
    untranspose_lanes(s.acc_t, tile.num_lanes, params.v.dim, s.lane.factor, s.dim_stride, s.rows);
    store_lanes(s.rows, s.dim_stride, tile, group, s.lane, params.out);
}

}  // namespace splitkv::cpu::SPLITKV_ISA
