#include "cuda/launch.h"
#include "cuda/zero_tiles.h"

namespace splitkv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorBytes = 16;

struct ZeroTilesParams {
    Rows tensor;           // [rows, heads, dim], any dtype
    const int32_t* tiles;  // [num_tiles]
    int64_t tile_rows;
};

// A CTA for each tile of one head.
__global__ void __launch_bounds__(kThreads)
    zero_tiles_kernel(const __grid_constant__ ZeroTilesParams params) {
    const Rows& tensor = params.tensor;
    const int64_t first_row = params.tiles[blockIdx.x] * params.tile_rows;
    const int element_bytes = tensor.dtype == DType::kFloat32 ? 4 : 2;
    char* head = static_cast<char*>(tensor.data) + blockIdx.y * tensor.head_stride * element_bytes;
    const int vectors_per_row = static_cast<int>(tensor.dim) * element_bytes / kVectorBytes;
    const int num_vectors = static_cast<int>(params.tile_rows) * vectors_per_row;
    for (int i = static_cast<int>(threadIdx.x); i < num_vectors; i += kThreads) {
        const int64_t row = first_row + i / vectors_per_row;
        if (row >= tensor.rows) return;
        char* target = head + row * tensor.row_stride * element_bytes;
        reinterpret_cast<int4*>(target)[i % vectors_per_row] = {0, 0, 0, 0};
    }
}

}  // namespace

void zero_tiles(const Rows& tensor, const int32_t* tiles, int64_t num_tiles, int64_t tile_rows,
                void* stream) {
    if (num_tiles == 0) return;
    LaunchConfig config{};
    config.grid = dim3(static_cast<unsigned>(num_tiles), static_cast<unsigned>(tensor.heads));
    config.block = dim3(kThreads);
    config.cluster = no_cluster();
    config.stream = static_cast<cudaStream_t>(stream);
    launch(zero_tiles_kernel, config, ZeroTilesParams{tensor, tiles, tile_rows});
}

}  // namespace splitkv::cuda
