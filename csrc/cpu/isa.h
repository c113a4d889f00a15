// What the drivers (compiled for the baseline CPU) and the tile kernels (compiled once per
// instruction set) share. Only plain data and constants: an inline function here would be compiled
// with different flags in different files, and the linker would keep any one of them.
#pragma once

#include <cstdint>

#include "attention/params.h"

namespace splitkv::cpu {

// A row tile packs kRowTile (query row, query head of one KV head) pairs into vector lanes.
// 64 lanes are four AVX-512 vectors: with 6 rows of the left operand they fill the register file.
constexpr int kRowTile = 64;
// Keys of one step. K, V and the scores of a step take 160 KiB at head dim 128: they stay in L2.
constexpr int kKeyTile = 128;
// Distance of two rows of a [.., kRowTile] scratch array. Not a multiple of a big power of two, so
// that rows don't fall on the same few cache sets.
constexpr int kLaneStride = kRowTile + 16;
// Scratch rows of head dims are padded the same way; also a multiple of every vector length.
constexpr int kDimPadding = 16;

// Keys [key_begin, key_end) that at least one row of the tile sees, inside one aligned KV tile.
struct Piece {
    int32_t key_begin;
    int32_t key_end;
    // Backward: how many earlier pieces add to the same KV tile. Fixes the order of the sum.
    int32_t turn;
};

// Lanes [first_lane, first_lane + num_lanes) of one KV head. Lane l is query row l / group and
// query head kv_head * group + l % group, where group = Hq / Hkv.
struct RowTile {
    int64_t first_lane;
    int32_t num_lanes;
    int64_t kv_head;
    const Piece* pieces;
    int64_t num_pieces;
};

// Per-lane state, one float or int per lane.
struct LaneScratch {
    int32_t* begin;  // [kRowTile], begin = end = 0 for a dead lane: no row, or a row with no key
    int32_t* end;    // [kRowTile]
    float* max;      // [kRowTile], forward: running maximum of the scores, in log2
    float* sum;      // [kRowTile], forward: running sum of exp2(score - max)
    float* factor;   // [kRowTile], forward: exp2(old max - new max)
    float* lse;      // [kRowTile], backward: lse in log2, +inf for a dead lane
    float* delta;    // [kRowTile], backward: delta, 0 for a dead lane
};

// Working memory of one thread. Suffix _t: transposed, lanes run fastest, rows kLaneStride apart.
// Others: rows dim_stride apart, where dim_stride = padded(max(D, Dv)) + kDimPadding.
struct TileScratch {
    int64_t dim_stride;
    float* rows;      // [kRowTile, dim] forward: q before, out after; backward: q
    float* dout;      // [kRowTile, dim] backward
    float* q_t;       // [D, kRowTile], times softmax_scale * log2(e)
    float* dout_t;    // [Dv, kRowTile] backward
    float* acc_t;     // forward: out [Dv, kRowTile]; backward: dq [D, kRowTile]
    float* keys;      // [kKeyTile, D]
    float* values;    // [kKeyTile, Dv]
    float* probs_t;   // [kKeyTile, kRowTile] scores, then probabilities
    float* dprobs_t;  // [kKeyTile, kRowTile] backward: dout.v, then ds
    float* dkeys;     // [kKeyTile, D] backward: what this piece adds to dk
    float* dvalues;   // [kKeyTile, Dv] backward
    LaneScratch lane;
};

// The kernels of one instruction set.
struct Isa {
    const char* name;
    // Writes out and lse of the tile's rows, also when the tile has no piece.
    void (*forward_tile)(const ForwardParams& params, const RowTile& tile,
                         const TileScratch& scratch);
    // Writes dq of the tile's rows and adds to dk and dv. turns: one counter per KV tile of this
    // KV head; a piece waits until the counter equals its turn, adds, and passes the turn on.
    void (*backward_tile)(const BackwardParams& params, const RowTile& tile,
                          const TileScratch& scratch, int32_t* turns);
    // target[i] = weight * source[i], or += when is_first is false; n elements.
    void (*merge_row)(const void* source, DType dtype, int64_t n, float weight, bool is_first,
                      float* target);
    // target[i] = source[i] / scale as fp16 and returns scale = max |source[i]|; n elements.
    float (*encode_row)(const float* source, int64_t n, uint16_t* target);
};

namespace baseline {
extern const Isa kIsa;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Isa kIsa;
}
namespace avx512 {
extern const Isa kIsa;
}
#endif

// The best instruction set of this machine, or the forced one.
const Isa& current_isa();

}  // namespace splitkv::cpu
