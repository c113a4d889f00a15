// Tile sizes of the sm_90a kernels, chosen in one place for kernels and work lists. Host and
// device.
#pragma once

#include <cstdint>

namespace splitkv::sm90 {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupRows = 64;         // M of one wgmma
inline constexpr int kMaxSmemBytes = 227 * 1024;  // of one CTA

// What the tiles of a call are made for.
enum class TileKind : int32_t {
    kEdge = 0,      // short key tiles: little is walked over in vain at the ends of intervals
    kInterior = 1,  // long key tiles: faster where intervals are much longer
    kShort = 2,     // the rows of a KV head's group fit one warpgroup; reading the keys is the cost
};

struct ForwardTile {
    int rows;       // 64 per consumer warpgroup
    int keys;       // a multiple of 8 (wgmma N) and 16 (wgmma K)
    int consumers;  // warpgroups
    int stages;     // of K and of V
    // Exponentials of a thread's first row that are taken before waiting for p . v, in parts of 4
    // of that row. Only the schedule depends on it; best values as measured on an H200.
    int quarters_before_wait;
};

// Limits that set the numbers: 65536 registers (240 for each thread of 2 consumers, 160 of 3, next
// to a producer), accumulators of keys / 2 + head_dim_v / 2 registers, 227 KB of shared memory.
// keys == 0 says that there is no kernel.
constexpr ForwardTile forward_tile(int head_dim_qk, int head_dim_v, TileKind kind) {
    if (head_dim_qk == 64 && head_dim_v == 64) {
        // 3 consumers: with half the matrix work per exponential, softmax must hide under two.
        return {192, 128, 3, 2, 2};
    }
    if (head_dim_qk == 128 && head_dim_v == 128) {
        if (kind == TileKind::kShort) return {64, 64, 1, 6, 0};
        if (kind == TileKind::kInterior) return {128, 176, 2, 2, 4};
        return {128, 128, 2, 2, 0};
    }
    if (head_dim_qk == 192 && head_dim_v == 128) return {128, 128, 2, 2, 0};
    if (head_dim_qk == 256 && head_dim_v == 256) return {128, 80, 2, 2, 0};
    return {0, 0, 0, 0, 0};
}

constexpr bool has_forward(int64_t head_dim_qk, int64_t head_dim_v) {
    return head_dim_qk <= 256 && head_dim_v <= 256 &&
           forward_tile(static_cast<int>(head_dim_qk), static_cast<int>(head_dim_v),
                        TileKind::kEdge)
                   .keys > 0;
}

// The kinds other than kEdge that have a kernel of their own.
constexpr bool has_tile_kind(int head_dim_qk, int head_dim_v, TileKind kind) {
    return kind == TileKind::kEdge || (head_dim_qk == 128 && head_dim_v == 128);
}

struct BackwardTile {
    int rows;       // query rows of one step: 64 or 128
    int keys;       // of the KV tile that a CTA owns
    int consumers;  // warpgroups that hold dk and dv
    int q_stages;
    int dout_stages;
    bool is_wide;  // the kernel of mainloop_bwd_wide.cuh
};

// Limits that set the numbers: 232 registers of a consumer thread, which holds dk and dv
// ((head_dim_qk + head_dim_v) / 2), scores and their gradient (rows / 2 each) or its half of dq;
// 227 KB of shared memory, of which dq in fp32 takes 32. Wide head dims leave no registers beside
// dk and dv for scores, which are then computed by a warpgroup of their own; 64 keys of (256, 256)
// or 128 of (192, 128) are all that two consumers can hold. keys == 0 says that there is no kernel.
constexpr BackwardTile backward_tile(int head_dim_qk, int head_dim_v) {
    if (head_dim_qk == 64 && head_dim_v == 64) return {128, 128, 2, 2, 2, false};
    if (head_dim_qk == 128 && head_dim_v == 128) return {64, 128, 2, 2, 2, false};
    if (head_dim_qk == 192 && head_dim_v == 128) return {64, 128, 2, 2, 2, true};
    if (head_dim_qk == 256 && head_dim_v == 256) return {64, 64, 2, 2, 1, true};
    return {0, 0, 0, 0, 0, false};
}

constexpr bool has_backward(int64_t head_dim_qk, int64_t head_dim_v) {
    return head_dim_qk <= 256 && head_dim_v <= 256 &&
           backward_tile(static_cast<int>(head_dim_qk), static_cast<int>(head_dim_v)).keys > 0;
}

}  // namespace splitkv::sm90
