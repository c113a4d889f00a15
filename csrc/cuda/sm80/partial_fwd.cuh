// Forward of partial attention: out and lse of each query row over its own interval of the keys.
//
// One CTA for each item and tile head. Its warps own 32 or 16 rows each and walk over the key tiles
// together: while they multiply q . k^T, v of the same tile is on its way, and while they multiply
// p . v, k of the next one. Probabilities never leave registers. The result is written, or a fp32
// partial where the keys of a row tile were split over several items.
#pragma once

#include <algorithm>
#include <utility>

#include "cuda/launch.h"
#include "cuda/operand.h"
#include "cuda/sm80/partial_fwd.h"
#include "cuda/sm80/rows.cuh"

namespace splitkv::sm80 {

struct ForwardKernelParams {
    Rows q;                          // [Tq, Hq, D]
    Rows k;                          // [Tk, Hkv, D]
    Rows v;                          // [Tk, Hkv, Dv]
    const cuda::ForwardItem* items;  // [num_items]
    const int32_t* kv_begin;         // [Tq]
    const int32_t* kv_end;           // [Tq]
    Rows out;                        // [Tq, Hq, Dv], fp32, bf16 or fp16
    Rows lse;                        // [Tq, Hq, 1], fp32
    Rows part_out;                   // [part rows, Hq, Dv], fp32
    Rows part_lse;                   // [part rows, Hq, 1], fp32
    int32_t num_items;
    int32_t num_tile_heads;  // times that each item is done
    int32_t heads_per_tile;
    int32_t group;  // query heads of one KV head
    int32_t is_head_major;
    float scale_log2;  // softmax_scale * log2(e)
};

template <typename ElementType, int kDimQk, int kDimV>
struct ForwardTraits {
    using Element = ElementType;  // of q, k and v; 16 bits
    static constexpr int kHeadDimQk = kDimQk;
    static constexpr int kHeadDimV = kDimV;
    static constexpr RowTileSize kTile = forward_tile(kDimQk, kDimV);
    static constexpr int kRows = kTile.rows;
    static constexpr int kKeys = kTile.keys;
    static constexpr int kThreads = kTile.warps * kWarpThreads;
    static constexpr int kCount = kRows / kTile.warps / kMmaRows;  // times 16 rows of a warp
    static_assert(kCount * kTile.warps * kMmaRows == kRows, "warps own whole groups of 16 rows");
};

template <typename Traits>
struct ForwardSmem {
    alignas(kChunkRowBytes) uint8_t q[tile_bytes(Traits::kRows, Traits::kHeadDimQk)];
    alignas(kChunkRowBytes) uint8_t k[tile_bytes(Traits::kKeys, Traits::kHeadDimQk)];
    alignas(kChunkRowBytes) uint8_t v[tile_bytes(Traits::kKeys, Traits::kHeadDimV)];
    RowKeys keys[Traits::kRows];
    TileWork work;  // not in registers, of which the main loop has none to spare
};

template <typename Traits>
class ForwardCta {
  public:
    using Element = typename Traits::Element;
    static constexpr int kCount = Traits::kCount;
    static constexpr int kScoreRegisters = accumulator_registers(Traits::kKeys);
    static constexpr int kOutRegisters = accumulator_registers(Traits::kHeadDimV);

    SPLITKV_DEVICE ForwardCta(const ForwardKernelParams& kernel_params, ForwardSmem<Traits>& shared)
        : params(kernel_params),
          smem(shared),
          warp_row(static_cast<int>(threadIdx.x) / kWarpThreads * kCount * kMmaRows) {
        const TileWork work = tile_work(params.items, params.num_items, params.num_tile_heads,
                                        params.is_head_major, params.heads_per_tile, params.group);
        if (threadIdx.x == 0) smem.work = work;
        load_row_keys(work, params.heads_per_tile, Traits::kRows, params.kv_begin, params.kv_end,
                      smem.keys);
        __syncthreads();
#pragma unroll
        for (int m = 0; m < kCount; ++m) {
#pragma unroll
            for (int row = 0; row < kRowsPerThread; ++row) {
                max[m][row] = -INFINITY;
                sum[m][row] = 0.0f;
            }
        }
        clear(out);
    }

    SPLITKV_DEVICE void attend() {
        const cuda::ForwardItem& item = smem.work.item;
        if (item.num_tiles == 0) return;
        load_q();
        load_k(item.key_begin);
        ptx::cp_async_commit_group();
        for (int tile = 0; tile < item.num_tiles; ++tile) {
            const int first_key = item.key_begin + tile * Traits::kKeys;
            // Everyone sees k of this tile, and nobody reads v of the one before any more.
            ptx::cp_async_wait_group<0>();
            __syncthreads();
            load_v(first_key);
            ptx::cp_async_commit_group();
            float s[kCount][kScoreRegisters];
            clear(s);
            multiply_rows<Element, Traits::kHeadDimQk>(
                row_reader<Traits::kRows>(ptx::smem_address(smem.q), warp_row),
                transposed_reader<Traits::kKeys>(ptx::smem_address(smem.k)), s);
            // The same with v and k changed about.
            ptx::cp_async_wait_group<0>();
            __syncthreads();
            if (tile + 1 < item.num_tiles) {
                load_k(first_key + Traits::kKeys);
                ptx::cp_async_commit_group();
            }
            if (tile < item.full_begin || tile >= item.full_end) {
#pragma unroll
                for (int m = 0; m < kCount; ++m) {
                    mask_scores(smem.keys + warp_row + m * kMmaRows, first_key, s[m]);
                }
            }
#pragma unroll
            for (int m = 0; m < kCount; ++m) softmax(m, s[m]);
            uint32_t p[kCount][kScoreRegisters / 8][4];
            pack<Element>(s, p);
            multiply_columns<Element>(p, row_reader<Traits::kKeys>(ptx::smem_address(smem.v)), out);
        }
    }

    SPLITKV_DEVICE void store() {
        store_rows(std::make_integer_sequence<int, kCount * kRowsPerThread>());
    }

  private:
    SPLITKV_DEVICE void load_q() {
        const Rows& q = params.q;
        const auto* data = static_cast<const Element*>(q.data) +
                           smem.work.item.row_begin * q.row_stride +
                           smem.work.first_head * q.head_stride;
        load_tile<Traits::kRows, Traits::kHeadDimQk, Traits::kThreads>(
            ptx::smem_address(smem.q),
            PackedRows<Element>{data, q.row_stride, q.head_stride, smem.work.item.num_rows,
                                params.heads_per_tile});
    }
    SPLITKV_DEVICE void load_k(int first_key) {
        load_tile<Traits::kKeys, Traits::kHeadDimQk, Traits::kThreads>(
            ptx::smem_address(smem.k), keys_of(params.k, first_key));
    }
    SPLITKV_DEVICE void load_v(int first_key) {
        load_tile<Traits::kKeys, Traits::kHeadDimV, Traits::kThreads>(ptx::smem_address(smem.v),
                                                                      keys_of(params.v, first_key));
    }
    SPLITKV_DEVICE HeadRows<Element> keys_of(const Rows& tensor, int first_key) {
        return {static_cast<const Element*>(tensor.data) + first_key * tensor.row_stride +
                    smem.work.kv_head * tensor.head_stride,
                tensor.row_stride, static_cast<int>(tensor.rows) - first_key};
    }

    // Scores to probabilities under the maximum so far; rescales what was summed under the old one.
    SPLITKV_DEVICE void softmax(int m, float (&s)[kScoreRegisters]) {
#pragma unroll
        for (int row = 0; row < kRowsPerThread; ++row) {
            float top = max[m][row];
#pragma unroll
            for (int j = 0; j < kScoreRegisters / 4; ++j) {
                top = fmaxf(top, fmaxf(s[4 * j + 2 * row], s[4 * j + 2 * row + 1]));
            }
            top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
            top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
            // -inf - (-inf) is NaN: a row without any finite score is shifted by 0.
            const float shift = top == -INFINITY ? 0.0f : top * params.scale_log2;
            const float alpha = ptx::ex2_approx(fmaf(max[m][row], params.scale_log2, -shift));
            max[m][row] = top;
            float added = 0.0f;
#pragma unroll
            for (int j = 0; j < kScoreRegisters / 4; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = s[4 * j + 2 * row + e];
                    x = ptx::ex2_approx(fmaf(x, params.scale_log2, -shift));
                    added += x;
                }
            }
            sum[m][row] = fmaf(sum[m][row], alpha, added);
#pragma unroll
            for (int j = 0; j < kOutRegisters / 4; ++j) {
                out[m][4 * j + 2 * row] *= alpha;
                out[m][4 * j + 2 * row + 1] *= alpha;
            }
        }
    }

    template <int... kIndex>
    SPLITKV_DEVICE void store_rows(std::integer_sequence<int, kIndex...>) {
        (store_row<kIndex / kRowsPerThread, kIndex % kRowsPerThread>(), ...);
    }

    // Indices are template parameters: as loop variables they may stay ones, and then index
    // registers in local memory.
    template <int kM, int kRow>
    SPLITKV_DEVICE void store_row() {
        constexpr float kLn2 = 0.693147180559945309f;
        float total = sum[kM][kRow];
        total += __shfl_xor_sync(kAllLanes, total, 1);
        total += __shfl_xor_sync(kAllLanes, total, 2);
        const int m = warp_row + kM * kMmaRows + first_row_of_lane() + 8 * kRow;
        const TileRow at = tile_row(smem.work, params.heads_per_tile, m);
        if (!at.is_valid) return;
        // The largest score adds 1 to the sum. Not max == -INFINITY, which also holds for NaN.
        const bool is_empty = smem.keys[m].length == 0 || total == 0.0f;
        const bool is_part = smem.work.item.part_row >= 0;
        const Rows& target = is_part ? params.part_out : params.out;
        const Rows& lse = is_part ? params.part_lse : params.lse;
        const int64_t row = (is_part ? smem.work.item.part_row : smem.work.item.row_begin) + at.row;
        const int64_t offset = row * target.row_stride + at.head * target.head_stride;
        const float factor = __fdividef(1.0f, total);
        if (target.dtype == DType::kFloat32) {
            store_values<kM, kRow>(factor, is_empty, static_cast<float*>(target.data) + offset);
        } else if (target.dtype == DType::kBFloat16) {
            store_values<kM, kRow>(factor, is_empty,
                                   static_cast<__nv_bfloat16*>(target.data) + offset);
        } else {
            store_values<kM, kRow>(factor, is_empty, static_cast<__half*>(target.data) + offset);
        }
        if (lane() % 4 == 0) {
            const float value = fmaf(max[kM][kRow], params.scale_log2, log2f(total)) * kLn2;
            static_cast<float*>(lse.data)[row * lse.row_stride + at.head * lse.head_stride] =
                is_empty ? -INFINITY : value;
        }
    }

    template <int kM, int kRow, typename Out>
    SPLITKV_DEVICE void store_values(float factor, bool is_empty, Out* target) {
        target += first_column_of_lane();
#pragma unroll
        for (int j = 0; j < kOutRegisters / 4; ++j) {
            // Not out * 0: where no key was seen, out holds whatever hidden keys held.
            const float low = is_empty ? 0.0f : out[kM][4 * j + 2 * kRow] * factor;
            const float high = is_empty ? 0.0f : out[kM][4 * j + 2 * kRow + 1] * factor;
            if constexpr (std::is_same_v<Out, float>) {
                *reinterpret_cast<float2*>(target + 8 * j) = {low, high};
            } else {
                *reinterpret_cast<uint32_t*>(target + 8 * j) = ptx::cvt_rn_x2<Out>(low, high);
            }
        }
    }

    const ForwardKernelParams& params;
    ForwardSmem<Traits>& smem;
    const int warp_row;                 // first row of this warp in the tile
    float max[kCount][kRowsPerThread];  // of the raw scores, over all columns of the row
    float sum[kCount][kRowsPerThread];  // of exponentials, over this thread's columns
    float out[kCount][kOutRegisters];   // not yet divided by the sums
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    forward_kernel(const __grid_constant__ ForwardKernelParams params) {
    static_assert(sizeof(ForwardSmem<Traits>) <= kMaxSmemBytes,
                  "more shared memory than a CTA has on every card");
    extern __shared__ __align__(kChunkRowBytes) uint8_t raw_smem[];
    ForwardCta<Traits> cta(params, *reinterpret_cast<ForwardSmem<Traits>*>(raw_smem));
    cta.attend();
    cta.store();
}

template <typename Traits>
void launch_forward_kernel(const ForwardParams& params, const cuda::ForwardItem* items,
                           const cuda::ForwardWorkShape& shape, const ForwardParts& parts) {
    constexpr double kLog2E = 1.44269504088896340736;
    cuda::check_operand("q", params.q);
    cuda::check_operand("k", params.k);
    cuda::check_operand("v", params.v);
    ForwardKernelParams kernel_params{};
    kernel_params.q = params.q;
    kernel_params.k = params.k;
    kernel_params.v = params.v;
    kernel_params.items = items;
    kernel_params.kv_begin = params.kv_begin;
    kernel_params.kv_end = params.kv_end;
    kernel_params.out = params.out;
    kernel_params.lse = params.lse;
    kernel_params.part_out = parts.out;
    kernel_params.part_lse = parts.lse;
    kernel_params.num_items = static_cast<int32_t>(shape.num_items);
    kernel_params.num_tile_heads = static_cast<int32_t>(params.q.heads / shape.heads_per_tile);
    kernel_params.heads_per_tile = static_cast<int32_t>(shape.heads_per_tile);
    kernel_params.group = static_cast<int32_t>(params.q.heads / params.k.heads);
    kernel_params.is_head_major = static_cast<int32_t>(shape.is_head_major);
    kernel_params.scale_log2 = static_cast<float>(params.softmax_scale * kLog2E);
    cuda::LaunchConfig config{};
    config.grid = dim3(static_cast<unsigned>(shape.num_items * kernel_params.num_tile_heads));
    config.block = dim3(Traits::kThreads);
    config.cluster = cuda::no_cluster();
    config.smem_bytes = sizeof(ForwardSmem<Traits>);
    config.stream = static_cast<cudaStream_t>(params.launch.stream);
    cuda::launch(forward_kernel<Traits>, config, kernel_params);
}

// From head dims to an instantiation: 4 for each dtype.
template <typename Element>
void launch_forward_of(const ForwardParams& params, const cuda::ForwardItem* items,
                       const cuda::ForwardWorkShape& shape, const ForwardParts& parts) {
    switch (params.q.dim) {
        case 64:
            return launch_forward_kernel<ForwardTraits<Element, 64, 64>>(params, items, shape,
                                                                         parts);
        case 128:
            return launch_forward_kernel<ForwardTraits<Element, 128, 128>>(params, items, shape,
                                                                           parts);
        case 192:
            return launch_forward_kernel<ForwardTraits<Element, 192, 128>>(params, items, shape,
                                                                           parts);
        default:
            return launch_forward_kernel<ForwardTraits<Element, 256, 256>>(params, items, shape,
                                                                           parts);
    }
}

}  // namespace splitkv::sm80
