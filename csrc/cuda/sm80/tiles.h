// Tile sizes of the sm_80 kernels, chosen in one place for kernels and work lists. Host and device.
//
// One set serves every card from compute capability 8.0 on, so all fit the 99 KB of shared memory
// that a CTA has on 8.6 and 8.9. Next to it, 255 registers of a thread set the numbers.
#pragma once

#include <cstdint>

namespace splitkv::sm80 {

inline constexpr int kWarpThreads = 32;
inline constexpr int kMmaRows = 16;              // M of one mma
inline constexpr int kMaxSmemBytes = 99 * 1024;  // of one CTA on 8.6 and 8.9

// Rows of one CTA against key tiles that it walks over. keys == 0 says that there is no kernel.
struct RowTileSize {
    int rows;
    int keys;
    int warps;  // each owns rows / warps rows: 32, or 16 where accumulators of 32 do not fit
};

// A thread holds out (rows of the warp * head_dim_v / 32 registers) and scores (rows * keys / 32);
// shared memory q, one tile of k and one of v. Two CTAs share an SM that has room for them.
constexpr RowTileSize forward_tile(int head_dim_qk, int head_dim_v) {
    if (head_dim_qk == 64 && head_dim_v == 64) return {128, 64, 4};
    if (head_dim_qk == 128 && head_dim_v == 128) return {128, 64, 4};
    if (head_dim_qk == 192 && head_dim_v == 128) return {128, 64, 4};
    if (head_dim_qk == 256 && head_dim_v == 256) return {64, 64, 4};
    return {0, 0, 0};
}

// dq: a thread holds dq (rows of the warp * head_dim_qk / 32), scores and their gradient
// (rows * keys / 32 each); shared memory q, dout, and two stages of k and v.
constexpr RowTileSize dq_tile(int head_dim_qk, int head_dim_v) {
    if (head_dim_qk == 64 && head_dim_v == 64) return {128, 64, 4};
    if (head_dim_qk == 128 && head_dim_v == 128) return {128, 32, 4};
    if (head_dim_qk == 192 && head_dim_v == 128) return {64, 32, 4};
    if (head_dim_qk == 256 && head_dim_v == 256) return {64, 16, 4};
    return {0, 0, 0};
}

// dk and dv: keys that a CTA owns, against row tiles that it walks over.
struct KeyTileSize {
    int rows;
    int keys;          // 16 for each warp, or for each group of warps that part the columns
    int column_parts;  // warps that share 16 keys, each with its part of the columns of dk and dv
};

// A thread holds dk and dv ((head_dim_qk + head_dim_v) / 2 / column_parts registers), scores and
// their gradient (rows / 2 each); shared memory k, v, and two stages of q and dout.
constexpr KeyTileSize backward_tile(int head_dim_qk, int head_dim_v) {
    if (head_dim_qk == 64 && head_dim_v == 64) return {64, 128, 1};
    if (head_dim_qk == 128 && head_dim_v == 128) return {32, 128, 1};
    if (head_dim_qk == 192 && head_dim_v == 128) return {32, 64, 1};
    if (head_dim_qk == 256 && head_dim_v == 256) return {16, 64, 2};
    return {0, 0, 0};
}

constexpr bool has_kernels(int64_t head_dim_qk, int64_t head_dim_v) {
    return head_dim_qk <= 256 && head_dim_v <= 256 &&
           forward_tile(static_cast<int>(head_dim_qk), static_cast<int>(head_dim_v)).keys > 0;
}

}  // namespace splitkv::sm80
