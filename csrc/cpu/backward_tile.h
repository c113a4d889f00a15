// Backward of one row tile, under the softmax of the merged result.
//
//   for each piece of keys:
//     probs_t = exp2(K . q_t - lse)                     [keys, lanes]
//     ds_t    = probs_t * (V . dout_t - delta)          [keys, lanes]
//     dq_t   += K^T . ds_t                              [D, lanes], stays in the tile
//     dv[keys] += probs_t . dout, dk[keys] += scale * ds_t . q     in the order of turns
//   dq = scale * dq_t^T
//
// dk and dv are shared by the row tiles. Each KV tile has a counter that lets the row tiles add in
// one fixed order, so the sum is the same bits for any number of threads.
#pragma once

#include <sched.h>

#include "cpu/gemm.h"
#include "cpu/tile.h"

namespace splitkv::cpu::SPLITKV_ISA {

// Reads lse (in log2) and delta. A dead lane, or a row whose merged result is empty, gets
// lse = +inf, hence probability 0, and delta = 0; its interval is emptied so that the rest of the
// tile never reads its q or dout.
static inline void load_row_statistics(const BackwardParams& params, const RowTile& tile,
                                       int64_t group, const LaneScratch& lane) {
    LaneCursor cursor = LaneCursor::start(tile, group);
    for (int i = 0; i < kRowTile; ++i) {
        lane.lse[i] = kInfinity;
        lane.delta[i] = 0.0f;
        if (is_alive(lane, i)) {
            const float lse = *float_pointer(params.lse, cursor.row, cursor.head());
            if (lse == -kInfinity) {
                lane.begin[i] = lane.end[i] = 0;
            } else {
                lane.lse[i] = lse * kLog2E;
                lane.delta[i] = *float_pointer(params.delta, cursor.row, cursor.head());
            }
        }
        cursor.advance();
    }
}

// probs_t: scores to probabilities; dprobs_t: dout.v to ds. One vector of lanes.
static inline void softmax_gradient_column(const LaneScratch& lane, const Piece& piece, int column,
                                           bool needs_mask, const TileScratch& s) {
    const Floats lse = load(lane.lse + column);
    const Floats delta = load(lane.delta + column);
    const Ints begin = load(lane.begin + column);
    const Ints end = load(lane.end + column);
    for (int32_t key = piece.key_begin; key < piece.key_end; ++key) {
        const int64_t offset = (key - piece.key_begin) * int64_t{kLaneStride} + column;
        Floats p = exp2(load(s.probs_t + offset) - lse);
        Floats ds = p * (load(s.dprobs_t + offset) - delta);
        if (needs_mask) {
            const Ints index = broadcast(key);
            const Ints is_visible = (begin <= index) & (index < end);
            p = is_visible ? p : Floats{};
            ds = is_visible ? ds : Floats{};
        }
        store(s.probs_t + offset, p);
        store(s.dprobs_t + offset, ds);
    }
}

// [keys, lanes] . [lanes, dim] over the lanes of the span; right operand in rows of dim.
static inline void multiply_by_rows(const float* left_t, const float* rows, const LaneSpan& span,
                                    int num_keys, int64_t dim, int64_t dim_stride, float* result) {
    Gemm g{};
    g.a = left_t + span.begin;
    g.lda = kLaneStride;
    g.b = rows + span.begin * dim_stride;
    g.ldb = dim_stride;
    g.c = result;
    g.ldc = dim_stride;
    g.m = num_keys;
    g.n = round_up_to_lanes(dim);
    g.k = span.end - span.begin;
    gemm<false>(g);
}

// [keys, dim] . [dim, lanes] over the lanes of the span.
static inline void multiply_by_rows_t(const float* keys, int64_t dim, int64_t dim_stride,
                                      const float* rows_t, const LaneSpan& span, int num_keys,
                                      float* result_t) {
    Gemm g{};
    g.a = keys;
    g.lda = dim_stride;
    g.b = rows_t + span.begin;
    g.ldb = kLaneStride;
    g.c = result_t + span.begin;
    g.ldc = kLaneStride;
    g.m = num_keys;
    g.n = span.end - span.begin;
    g.k = static_cast<int>(dim);
    gemm<false>(g);
}

static inline void add_keys(const float* source, int64_t stride, float factor, const Piece& piece,
                            int64_t kv_head, const Rows& tensor) {
    for (int64_t key = piece.key_begin; key < piece.key_end; ++key, source += stride) {
        float* target = float_pointer(tensor, key, kv_head);
        for (int64_t d = 0; d < tensor.dim; ++d) target[d] += source[d] * factor;
    }
}

// Tiles are started in the order of their turns, so the tile that holds the lowest turn never
// waits, and every wait ends.
static inline void wait_for_turn(const int32_t* turn, int32_t mine) {
    constexpr int kSpins = 256;  // about a microsecond, then let other threads run
    for (int spin = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != mine; ++spin) {
        if (spin >= kSpins) sched_yield();
    }
}

static inline void backward_piece(const BackwardParams& params, const RowTile& tile,
                                  const Piece& piece, const float* ones, const TileScratch& s,
                                  int32_t* turns) {
    const LaneSpan span = span_of_piece(s.lane, piece);
    const int num_keys = piece.key_end - piece.key_begin;
    const bool has_work = span.begin < span.end;
    if (has_work) {
        load_keys(params.k, piece, tile.kv_head, s.dim_stride, s.keys);
        load_keys(params.v, piece, tile.kv_head, s.dim_stride, s.values);
        multiply_by_rows_t(s.keys, params.k.dim, s.dim_stride, s.q_t, span, num_keys, s.probs_t);
        multiply_by_rows_t(s.values, params.v.dim, s.dim_stride, s.dout_t, span, num_keys,
                           s.dprobs_t);
        for (int column = span.begin; column < span.end; column += kLanes) {
            softmax_gradient_column(s.lane, piece, column, span.needs_mask, s);
        }
        multiply_by_rows(s.probs_t, s.dout, span, num_keys, params.v.dim, s.dim_stride, s.dvalues);
        multiply_by_rows(s.dprobs_t, s.rows, span, num_keys, params.k.dim, s.dim_stride, s.dkeys);

        Gemm dq{};
        dq.a = s.keys;
        dq.lda = s.dim_stride;
        dq.b = s.dprobs_t + span.begin;
        dq.ldb = kLaneStride;
        dq.c = s.acc_t + span.begin;
        dq.ldc = kLaneStride;
        dq.m = static_cast<int>(params.k.dim);
        dq.n = span.end - span.begin;
        dq.k = num_keys;
        dq.scale = ones;
        gemm<true>(dq);
    }
    int32_t* turn = turns + piece.key_begin / kKeyTile;
    wait_for_turn(turn, piece.turn);
    if (has_work) {
        add_keys(s.dkeys, s.dim_stride, params.softmax_scale, piece, tile.kv_head, params.dk);
        add_keys(s.dvalues, s.dim_stride, 1.0f, piece, tile.kv_head, params.dv);
    }
    __atomic_store_n(turn, piece.turn + 1, __ATOMIC_RELEASE);
}

static void backward_tile(const BackwardParams& params, const RowTile& tile, const TileScratch& s,
                          int32_t* turns) {
    const int64_t group = params.q.heads / params.k.heads;
    const int lanes = round_up_to_lanes(tile.num_lanes);
    load_intervals(params.kv_begin, params.kv_end, tile, group, s.lane);
    load_row_statistics(params, tile, group, s.lane);
    if (tile.num_pieces > 0) {
        load_lanes(params.q, tile, group, s.lane, s.dim_stride, s.rows);
        load_lanes(params.dout, tile, group, s.lane, s.dim_stride, s.dout);
        transpose_lanes(s.rows, s.dim_stride, lanes, params.q.dim, params.softmax_scale * kLog2E,
                        s.q_t);
        transpose_lanes(s.dout, s.dim_stride, lanes, params.v.dim, 1.0f, s.dout_t);
    }
    for (int64_t d = 0; d < params.q.dim; ++d) {
        for (int i = 0; i < lanes; ++i) s.acc_t[d * kLaneStride + i] = 0.0f;
    }
    float* ones = s.lane.factor;
    for (int i = 0; i < kRowTile; ++i) ones[i] = 1.0f;
    for (int64_t i = 0; i < tile.num_pieces; ++i) {
        backward_piece(params, tile, tile.pieces[i], ones, s, turns);
    }
    for (int i = 0; i < kRowTile; ++i) s.lane.factor[i] = params.softmax_scale;
    untranspose_lanes(s.acc_t, tile.num_lanes, params.q.dim, s.lane.factor, s.dim_stride, s.rows);
    store_lanes(s.rows, s.dim_stride, tile, group, s.lane, params.dq);
}

}  // namespace splitkv::cpu::SPLITKV_ISA
