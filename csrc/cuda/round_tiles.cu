#include "cuda/launch.h"
#include "cuda/round_tiles.h"
#include "cuda/rowwise.cuh"

namespace splitkv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 4;  // of a thread: 16 bytes read, 8 written

struct RoundTilesParams {
    Rows sums;             // [num_tiles * tile_rows, heads, dim], fp32
    Rows rounded;          // [rows, heads, dim], bf16 or fp16
    const int32_t* tiles;  // [num_tiles]
    int64_t tile_rows;
};

// A CTA for each tile of one head.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    round_tiles_kernel(const __grid_constant__ RoundTilesParams params) {
    const int64_t first_sum = blockIdx.x * params.tile_rows;
    const int64_t first_row = params.tiles[blockIdx.x] * params.tile_rows;
    const int vectors_per_row = static_cast<int>(params.rounded.dim / kColumns);
    const int num_vectors = static_cast<int>(params.tile_rows) * vectors_per_row;
    for (int i = static_cast<int>(threadIdx.x); i < num_vectors; i += kThreads) {
        const int row = i / vectors_per_row;
        const int column = i % vectors_per_row * kColumns;
        if (first_row + row >= params.rounded.rows) return;
        const float* source = row_of<float>(params.sums, first_sum + row, blockIdx.y) + column;
        Element* target =
            mutable_row_of<Element>(params.rounded, first_row + row, blockIdx.y) + column;
        store_values<Element, kColumns>(load_values<float, kColumns>(source), target);
    }
}

}  // namespace

void round_tiles(const Rows& sums, const Rows& rounded, const int32_t* tiles, int64_t num_tiles,
                 int64_t tile_rows, void* stream) {
    if (num_tiles == 0) return;
    LaunchConfig config{};
    config.grid = dim3(static_cast<unsigned>(num_tiles), static_cast<unsigned>(rounded.heads));
    config.block = dim3(kThreads);
    config.cluster = no_cluster();
    config.stream = static_cast<cudaStream_t>(stream);
    const RoundTilesParams params{sums, rounded, tiles, tile_rows};
    if (rounded.dtype == DType::kBFloat16) {
        launch(round_tiles_kernel<__nv_bfloat16>, config, params);
    } else {
        launch(round_tiles_kernel<__half>, config, params);
    }
}

}  // namespace splitkv::cuda
