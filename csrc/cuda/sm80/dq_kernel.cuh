// dq of each query row: a walk over the key tiles that the rows of an item see, as in the forward.
//
//   p = exp(q . k scale - lse),  ds = p (dout . v - delta),  dq = scale sum of ds k
//
// k and v of the next tile are on their way while those of this one are multiplied. Scores are
// worked out a second time here, next to dkv_kernel.cuh, so that neither kernel adds to memory that
// another CTA adds to: the result has the same bits in each run.
#pragma once

#include <utility>

#include "cuda/launch.h"
#include "cuda/sm80/partial_bwd.h"
#include "cuda/sm80/rows.cuh"

namespace splitkv::sm80 {

inline constexpr int kStages = 2;  // of the tiles that a backward kernel walks over
inline constexpr float kLog2E = 1.44269504088896340736f;

// lse in base 2 as the exponents take it: +inf, which makes every probability 0, for a row that
// sees no key here or saw none at all.
SPLITKV_DEVICE float exponent_shift(float lse, bool sees_keys) {
    return sees_keys && lse != -INFINITY ? lse * kLog2E : INFINITY;
}

struct DqKernelParams {
    Rows dout;                       // [Tq, Hq, Dv], dtype of q
    Rows q;                          // [Tq, Hq, D]
    Rows k;                          // [Tk, Hkv, D]
    Rows v;                          // [Tk, Hkv, Dv]
    Rows lse;                        // [Tq, Hq, 1], fp32
    Rows delta;                      // [Tq, Hq, 1], fp32
    Rows dq;                         // [Tq, Hq, D], fp32
    Rows part_dq;                    // [part rows, Hq, D], fp32
    const cuda::ForwardItem* items;  // [num_items]
    const int32_t* kv_begin;         // [Tq]
    const int32_t* kv_end;           // [Tq]
    int32_t num_items;
    int32_t num_tile_heads;  // times that each item is done
    int32_t heads_per_tile;
    int32_t group;  // query heads of one KV head
    int32_t is_head_major;
    float softmax_scale;
    float scale_log2;  // softmax_scale * log2(e)
};

template <typename ElementType, int kDimQk, int kDimV>
struct DqTraits {
    using Element = ElementType;  // of q, k, v and dout; 16 bits
    static constexpr int kHeadDimQk = kDimQk;
    static constexpr int kHeadDimV = kDimV;
    static constexpr RowTileSize kTile = dq_tile(kDimQk, kDimV);
    static constexpr int kRows = kTile.rows;
    static constexpr int kKeys = kTile.keys;
    static constexpr int kThreads = kTile.warps * kWarpThreads;
    static constexpr int kCount = kRows / kTile.warps / kMmaRows;  // times 16 rows of a warp

    static_assert(kCount * kTile.warps * kMmaRows == kRows, "warps own whole groups of 16 rows");
};

// What the exponentials of a row need beside its scores.
struct RowStatistics {
    float shift;
    float delta;
};

template <typename Traits>
struct DqSmem {
    alignas(kChunkRowBytes) uint8_t q[tile_bytes(Traits::kRows, Traits::kHeadDimQk)];
    alignas(kChunkRowBytes) uint8_t dout[tile_bytes(Traits::kRows, Traits::kHeadDimV)];
    alignas(kChunkRowBytes) uint8_t k[kStages][tile_bytes(Traits::kKeys, Traits::kHeadDimQk)];
    alignas(kChunkRowBytes) uint8_t v[kStages][tile_bytes(Traits::kKeys, Traits::kHeadDimV)];
    RowKeys keys[Traits::kRows];
    RowStatistics statistics[Traits::kRows];
    TileWork work;
};

template <typename Traits>
class DqCta {
  public:
    using Element = typename Traits::Element;
    static constexpr int kCount = Traits::kCount;
    static constexpr int kScoreRegisters = accumulator_registers(Traits::kKeys);
    static constexpr int kDqRegisters = accumulator_registers(Traits::kHeadDimQk);

    SPLITKV_DEVICE DqCta(const DqKernelParams& kernel_params, DqSmem<Traits>& shared)
        : params(kernel_params),
          smem(shared),
          warp_row(static_cast<int>(threadIdx.x) / kWarpThreads * kCount * kMmaRows) {
        const TileWork work = tile_work(params.items, params.num_items, params.num_tile_heads,
                                        params.is_head_major, params.heads_per_tile, params.group);
        if (threadIdx.x == 0) smem.work = work;
        load_row_keys(work, params.heads_per_tile, Traits::kRows, params.kv_begin, params.kv_end,
                      smem.keys);
        load_statistics(work);
        __syncthreads();
        clear(dq);
    }

    SPLITKV_DEVICE void walk() {
        const cuda::ForwardItem& item = smem.work.item;
        if (item.num_tiles == 0) return;
        load_rows<Traits::kHeadDimQk>(params.q, smem.q);
        load_rows<Traits::kHeadDimV>(params.dout, smem.dout);
        load_keys(item.key_begin, 0);
        for (int tile = 0; tile < item.num_tiles; ++tile) {
            const int first_key = item.key_begin + tile * Traits::kKeys;
            const int stage = tile % kStages;
            // Everyone sees this tile, and nobody reads the one before any more.
            ptx::cp_async_wait_group<0>();
            __syncthreads();
            if (tile + 1 < item.num_tiles) load_keys(first_key + Traits::kKeys, 1 - stage);
            step(first_key, stage, tile < item.full_begin || tile >= item.full_end);
        }
    }

    SPLITKV_DEVICE void store() {
        store_rows(std::make_integer_sequence<int, kCount * kRowsPerThread>());
    }

  private:
    // Each thread for the rows whose keys it has loaded.
    SPLITKV_DEVICE void load_statistics(const TileWork& work) {
        for (int m = static_cast<int>(threadIdx.x); m < Traits::kRows; m += Traits::kThreads) {
            const TileRow at = tile_row(work, params.heads_per_tile, m);
            RowStatistics row{INFINITY, 0.0f};
            if (at.is_valid) {
                const int64_t index = work.item.row_begin + at.row;
                const Rows& lse = params.lse;
                const Rows& delta = params.delta;
                row.shift = exponent_shift(
                    static_cast<const float*>(
                        lse.data)[index * lse.row_stride + at.head * lse.head_stride],
                    smem.keys[m].length > 0);
                // delta of a row without keys may be anything.
                if (row.shift != INFINITY) {
                    row.delta = static_cast<const float*>(
                        delta.data)[index * delta.row_stride + at.head * delta.head_stride];
                }
            }
            smem.statistics[m] = row;
        }
    }

    template <int kColumns>
    SPLITKV_DEVICE void load_rows(const Rows& tensor, uint8_t* tile) {
        const TileWork& work = smem.work;
        const auto* data = static_cast<const Element*>(tensor.data) +
                           work.item.row_begin * tensor.row_stride +
                           work.first_head * tensor.head_stride;
        load_tile<Traits::kRows, kColumns, Traits::kThreads>(
            ptx::smem_address(tile),
            PackedRows<Element>{data, tensor.row_stride, tensor.head_stride, work.item.num_rows,
                                params.heads_per_tile});
    }

    SPLITKV_DEVICE void load_keys(int first_key, int stage) {
        load_tile<Traits::kKeys, Traits::kHeadDimQk, Traits::kThreads>(
            ptx::smem_address(smem.k[stage]), keys_of(params.k, first_key));
        load_tile<Traits::kKeys, Traits::kHeadDimV, Traits::kThreads>(
            ptx::smem_address(smem.v[stage]), keys_of(params.v, first_key));
        ptx::cp_async_commit_group();
    }
    SPLITKV_DEVICE HeadRows<Element> keys_of(const Rows& tensor, int first_key) {
        return {static_cast<const Element*>(tensor.data) + first_key * tensor.row_stride +
                    smem.work.kv_head * tensor.head_stride,
                tensor.row_stride, static_cast<int>(tensor.rows) - first_key};
    }

    SPLITKV_DEVICE void step(int first_key, int stage, bool is_masked) {
        const uint32_t k_tile = ptx::smem_address(smem.k[stage]);
        const uint32_t v_tile = ptx::smem_address(smem.v[stage]);
        float s[kCount][kScoreRegisters];
        float ds[kCount][kScoreRegisters];  // dout . v first
        clear(s);
        clear(ds);
        multiply_rows<Element, Traits::kHeadDimQk>(
            row_reader<Traits::kRows>(ptx::smem_address(smem.q), warp_row),
            transposed_reader<Traits::kKeys>(k_tile), s);
        multiply_rows<Element, Traits::kHeadDimV>(
            row_reader<Traits::kRows>(ptx::smem_address(smem.dout), warp_row),
            transposed_reader<Traits::kKeys>(v_tile), ds);
#pragma unroll
        for (int m = 0; m < kCount; ++m) {
            const int first_row = warp_row + m * kMmaRows;
            if (is_masked) mask_scores(smem.keys + first_row, first_key, s[m]);
#pragma unroll
            for (int row = 0; row < kRowsPerThread; ++row) {
                const RowStatistics at = smem.statistics[first_row + first_row_of_lane() + 8 * row];
#pragma unroll
                for (int j = 0; j < kScoreRegisters / 4; ++j) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int i = 4 * j + 2 * row + e;
                        const float p =
                            ptx::ex2_approx(fmaf(s[m][i], params.scale_log2, -at.shift));
                        ds[m][i] = p * (ds[m][i] - at.delta);
                    }
                }
            }
        }
        uint32_t packed[kCount][kScoreRegisters / 8][4];
        pack<Element>(ds, packed);
        multiply_columns<Element>(packed, row_reader<Traits::kKeys>(k_tile), dq);
    }

    template <int... kIndex>
    SPLITKV_DEVICE void store_rows(std::integer_sequence<int, kIndex...>) {
        (store_row<kIndex / kRowsPerThread, kIndex % kRowsPerThread>(), ...);
    }

    template <int kM, int kRow>
    SPLITKV_DEVICE void store_row() {
        const int m = warp_row + kM * kMmaRows + first_row_of_lane() + 8 * kRow;
        const TileWork& work = smem.work;
        const TileRow at = tile_row(work, params.heads_per_tile, m);
        if (!at.is_valid) return;
        const bool is_part = work.item.part_row >= 0;
        const Rows& target = is_part ? params.part_dq : params.dq;
        const int64_t row = (is_part ? work.item.part_row : work.item.row_begin) + at.row;
        float* values = static_cast<float*>(target.data) + row * target.row_stride +
                        at.head * target.head_stride + first_column_of_lane();
        const bool is_empty = smem.statistics[m].shift == INFINITY;
#pragma unroll
        for (int j = 0; j < kDqRegisters / 4; ++j) {
            const float low = dq[kM][4 * j + 2 * kRow] * params.softmax_scale;
            const float high = dq[kM][4 * j + 2 * kRow + 1] * params.softmax_scale;
            *reinterpret_cast<float2*>(values + 8 * j) = {is_empty ? 0.0f : low,
                                                          is_empty ? 0.0f : high};
        }
    }

    const DqKernelParams& params;
    DqSmem<Traits>& smem;
    const int warp_row;  // first row of this warp in the tile
    float dq[kCount][kDqRegisters];
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    dq_kernel(const __grid_constant__ DqKernelParams params) {
    static_assert(sizeof(DqSmem<Traits>) <= kMaxSmemBytes,
                  "more shared memory than a CTA has on every card");
    extern __shared__ __align__(kChunkRowBytes) uint8_t raw_smem[];
    DqCta<Traits> cta(params, *reinterpret_cast<DqSmem<Traits>*>(raw_smem));
    cta.walk();
    cta.store();
}

template <typename Traits>
void launch_dq_kernel(const BackwardParams& params, const BackwardWorkArrays& work,
                      const cuda::BackwardWorkShape& shape, const BackwardWorkspace& workspace) {
    DqKernelParams kernel_params{};
    kernel_params.dout = params.dout;
    kernel_params.q = params.q;
    kernel_params.k = params.k;
    kernel_params.v = params.v;
    kernel_params.lse = params.lse;
    kernel_params.delta = params.delta;
    kernel_params.dq = params.dq;
    kernel_params.part_dq = workspace.part_dq;
    kernel_params.items = work.dq_items;
    kernel_params.kv_begin = params.kv_begin;
    kernel_params.kv_end = params.kv_end;
    kernel_params.num_items = static_cast<int32_t>(shape.num_dq_items);
    kernel_params.num_tile_heads = static_cast<int32_t>(params.q.heads / shape.dq_heads_per_tile);
    kernel_params.heads_per_tile = static_cast<int32_t>(shape.dq_heads_per_tile);
    kernel_params.group = static_cast<int32_t>(params.q.heads / params.k.heads);
    kernel_params.is_head_major = static_cast<int32_t>(shape.is_dq_head_major);
    kernel_params.softmax_scale = params.softmax_scale;
    kernel_params.scale_log2 = params.softmax_scale * kLog2E;
    cuda::LaunchConfig config{};
    config.grid = dim3(static_cast<unsigned>(shape.num_dq_items * kernel_params.num_tile_heads));
    config.block = dim3(Traits::kThreads);
    config.cluster = cuda::no_cluster();
    config.smem_bytes = sizeof(DqSmem<Traits>);
    config.stream = static_cast<cudaStream_t>(params.launch.stream);
    cuda::launch(dq_kernel<Traits>, config, kernel_params);
}

}  // namespace splitkv::sm80
