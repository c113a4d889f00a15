// What the backward kernel needs to know of each query row, in the order of its tiles, so that one
// bulk copy brings a tile's share. One pass over lse, delta and the intervals.
#include "cuda/launch.h"
#include "cuda/sm90/partial_bwd.h"

namespace splitkv::sm90 {
namespace {

struct RowStatisticsParams {
    Rows lse;                                // [Tq, Hq, 1], fp32
    Rows delta;                              // [Tq, Hq, 1], fp32
    const int32_t* kv_begin;                 // [Tq]
    const int32_t* kv_end;                   // [Tq]
    const cuda::BackwardRowTile* row_tiles;  // [num_row_tiles]
    float* statistics;                       // [tile heads, num_row_tiles, 2, tile_rows]
    int32_t* limits;                         // [num_row_tiles, tile_rows, 2]
    int32_t num_row_tiles;
    int32_t tile_rows;
    int32_t heads_per_tile;
};

// A thread for each (row of the tile, head), heads innermost, as lse and delta lie in memory; as
// many CTAs for each row tile as that takes: few rows, too, are done at once.
__global__ void row_statistics_kernel(const __grid_constant__ RowStatisticsParams params) {
    constexpr float kLog2E = 1.44269504088896340736f;
    const int tile = static_cast<int>(blockIdx.x);
    const cuda::BackwardRowTile row_tile = params.row_tiles[tile];
    const int num_heads = static_cast<int>(params.lse.heads);
    const int rows_of_tile = params.tile_rows / params.heads_per_tile;
    const int i = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= rows_of_tile * num_heads) return;
    const int in_tile = i / num_heads;
    const int head = i % num_heads;
    const int64_t row = row_tile.row_begin + in_tile;
    const bool is_row = in_tile < row_tile.num_rows;
    const int32_t begin = is_row ? params.kv_begin[row] : 0;
    const int32_t length = is_row ? params.kv_end[row] - begin : 0;
    float lse = INFINITY;
    float delta = 0.0f;
    if (length > 0) {
        const float value = static_cast<const float*>(
            params.lse.data)[row * params.lse.row_stride + head * params.lse.head_stride];
        if (value != -INFINITY) {
            lse = value * kLog2E;
            delta = static_cast<const float*>(
                params.delta.data)[row * params.delta.row_stride + head * params.delta.head_stride];
        }
    }
    const int tile_head = head / params.heads_per_tile;
    const int place = in_tile * params.heads_per_tile + head % params.heads_per_tile;
    float* target = params.statistics +
                    (int64_t{tile_head} * params.num_row_tiles + tile) * 2 * params.tile_rows;
    target[place] = lse;
    target[params.tile_rows + place] = delta;
    if (head < params.heads_per_tile) {
        int32_t* limits = params.limits + (int64_t{tile} * params.tile_rows + place) * 2;
        limits[0] = begin;
        limits[1] = max(length, 0);
    }
}

}  // namespace

void launch_row_statistics(const BackwardParams& params, const BackwardWorkArrays& work,
                           const cuda::BackwardWorkShape& shape,
                           const BackwardWorkspace& workspace) {
    RowStatisticsParams kernel_params{};
    kernel_params.lse = params.lse;
    kernel_params.delta = params.delta;
    kernel_params.kv_begin = params.kv_begin;
    kernel_params.kv_end = params.kv_end;
    kernel_params.row_tiles = work.row_tiles;
    kernel_params.statistics = workspace.statistics;
    kernel_params.limits = workspace.limits;
    kernel_params.num_row_tiles = static_cast<int32_t>(shape.num_row_tiles);
    kernel_params.tile_rows =
        backward_tile(static_cast<int>(shape.head_dim_qk), static_cast<int>(shape.head_dim_v)).rows;
    kernel_params.heads_per_tile = static_cast<int32_t>(shape.heads_per_tile);
    cuda::LaunchConfig config{};
    constexpr int64_t kThreads = 256;
    const int64_t num_places =
        kernel_params.tile_rows / kernel_params.heads_per_tile * shape.num_heads_q;
    config.grid = dim3(static_cast<unsigned>(shape.num_row_tiles),
                       static_cast<unsigned>((num_places + kThreads - 1) / kThreads));
    config.block = dim3(static_cast<unsigned>(kThreads));
    config.cluster = cuda::no_cluster();
    config.stream = static_cast<cudaStream_t>(params.launch.stream);
    cuda::launch(row_statistics_kernel, config, kernel_params);
}

}  // namespace splitkv::sm90
