// encode: the wire format of partials, fp16 beside one fp32 scale for each (row, head). One pass
// over memory: a warp holds kPairsPerWarp heads in registers, finds the largest magnitude of each,
// and writes the quotients. Bitwise the result of the CPU.
#include "cuda/backend.h"
#include "cuda/launch.h"
#include "cuda/rowwise.cuh"

namespace splitkv::cuda {
namespace {

constexpr int kPairsPerWarp = 4;
constexpr int kWideVector = 4;  // 16 bytes read, 8 written
constexpr uint32_t kMagnitudeBits = 0x7fffffffu;

// A lane holds kSteps vectors of each pair, kWarpThreads vectors apart.
template <int kColumns, int kVectorsOfLane>
struct EncodeTraits {
    static constexpr int kVector = kColumns;
    static constexpr int kSteps = kVectorsOfLane;
    static constexpr int kStepColumns = kWarpThreads * kVector;
    // What is in flight is bounded by registers: 64 values.
    static constexpr int kPairs = kVector * kSteps <= 16 && kVector > 1 ? kPairsPerWarp : 1;
    static_assert(kVector * kSteps * kPairs <= 64, "values of a lane fit its registers");
};

__device__ __forceinline__ uint32_t warp_max(uint32_t x) {
#pragma unroll
    for (int step = kWarpThreads / 2; step > 0; step /= 2) {
        x = max(x, __shfl_xor_sync(kAllLanes, x, step));
    }
    return x;
}

// Row and head of the i-th pair of a warp, and where the values of the row are.
struct Pair {
    uint32_t row;
    uint32_t head;
    __device__ __forceinline__ int64_t source_row(const EncodeParams& params) const {
        return params.index == nullptr ? row : params.index[row];
    }
};

template <typename Traits>
__device__ __forceinline__ Pair pair_of(const EncodeParams& params, int i) {
    const auto heads = static_cast<uint32_t>(params.values.heads);
    const uint32_t index = global_warp() * Traits::kPairs + i;
    const uint32_t row = index / heads;
    return {row, index - row * heads};
}

template <typename Traits>
__global__ void __launch_bounds__(kWarpThreads* kWarpsPerCta)
    encode_kernel(const __grid_constant__ EncodeParams params) {
    constexpr int kVector = Traits::kVector;
    Values<kVector> values[Traits::kPairs][Traits::kSteps];
#pragma unroll
    for (int i = 0; i < Traits::kPairs; ++i) {
        const Pair pair = pair_of<Traits>(params, i);
        const bool is_row = pair.row < params.encoded.rows;
        const float* source =
            row_of<float>(params.values, is_row ? pair.source_row(params) : 0, pair.head);
#pragma unroll
        for (int step = 0; step < Traits::kSteps; ++step) {
            const int column = step * Traits::kStepColumns + lane() * kVector;
            values[i][step] = {};
            if (is_row && column < params.values.dim) {
                values[i][step] = load_values<float, kVector>(source + column);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < Traits::kPairs; ++i) {
        // Magnitudes are ordered like their bits, with NaN above infinity.
        uint32_t bits = 0;
#pragma unroll
        for (int step = 0; step < Traits::kSteps; ++step) {
#pragma unroll
            for (int c = 0; c < kVector; ++c) {
                bits = max(bits, __float_as_uint(values[i][step].x[c]) & kMagnitudeBits);
            }
        }
        bits = warp_max(bits);
        const Pair pair = pair_of<Traits>(params, i);
        const auto [row, head] = pair;
        if (row >= params.encoded.rows) return;
        const float scale = __uint_as_float(bits);
        const float divisor = bits == 0 ? 1.0f : scale;
        __half* target = mutable_row_of<__half>(params.encoded, row, head);
#pragma unroll
        for (int step = 0; step < Traits::kSteps; ++step) {
            const int column = step * Traits::kStepColumns + lane() * kVector;
            if (column >= params.values.dim) continue;
#pragma unroll
            for (int c = 0; c < kVector; ++c) values[i][step].x[c] /= divisor;
            store_values<__half, kVector>(values[i][step], target + column);
        }
        if (lane() != 0) continue;
        *mutable_row_of<float>(params.scale, row, head) = scale;
        if (params.lse.data != nullptr) {
            *mutable_row_of<float>(params.sent_lse, row, head) =
                *row_of<float>(params.lse, pair.source_row(params), head);
        }
    }
}

template <typename Traits>
void launch_encode(const EncodeParams& params) {
    const int64_t num_pairs = params.encoded.rows * params.values.heads;
    SPLITKV_CHECK(num_pairs < INT32_MAX, "rows * heads is ", num_pairs,
                  ", needs less than 2^31 - 1");
    constexpr int kPairsPerCta = Traits::kPairs * kWarpsPerCta;
    LaunchConfig config{};
    config.grid = dim3(static_cast<unsigned>((num_pairs + kPairsPerCta - 1) / kPairsPerCta));
    config.block = dim3(kWarpThreads * kWarpsPerCta);
    config.cluster = no_cluster();
    config.stream = static_cast<cudaStream_t>(params.launch.stream);
    launch(encode_kernel<Traits>, config, params);
}

}  // namespace

void encode(const EncodeParams& params) {
    if (params.encoded.rows * params.values.heads == 0) return;
    const DeviceGuard guard(params.launch.device_index);
    if (!is_wide(params.values, kWideVector) || !is_wide(params.encoded, kWideVector)) {
        return launch_encode<EncodeTraits<1, 16>>(params);
    }
    const int64_t dim = params.values.dim;
    if (dim <= 128) return launch_encode<EncodeTraits<kWideVector, 1>>(params);
    if (dim <= 256) return launch_encode<EncodeTraits<kWideVector, 2>>(params);
    return launch_encode<EncodeTraits<kWideVector, 4>>(params);
}

}  // namespace splitkv::cuda
