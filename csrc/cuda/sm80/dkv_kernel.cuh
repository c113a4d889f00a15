// dk and dv of the keys of one KV tile: a walk over the row tiles that see any of them, for all
// query heads of the group.
//
//   p = exp(q . k scale - lse),  dv += p^T . dout,  dk += scale ds^T . q,  ds = p (dout . v -
//   delta)
//
// Scores are worked out transposed, a warp's 16 keys against the rows of a tile, so that p^T and
// ds^T are where the next products want them and never leave registers. One CTA owns the keys: no
// atomics. Parts of a KV tile that was split add to dk and dv in turn, in a fixed order.
#pragma once

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/sm80/dkv_traits.cuh"

namespace splitkv::sm80 {

// One row tile for one tile head.
struct Step {
    int32_t row_begin;
    int32_t num_rows;
    int32_t first_head;  // query head of the tile's first row
    bool is_masked;
};

// Walks over the steps of an item: tile heads outermost, then segments, then their row tiles.
class StepCursor {
  public:
    SPLITKV_DEVICE StepCursor(const DkvKernelParams& kernel_params, const cuda::BackwardItem& item,
                              int kv_head)
        : params(kernel_params),
          segment_begin(item.segment_begin),
          segment_end(item.segment_begin + item.num_segments),
          head(kv_head * kernel_params.group) {
        enter(segment_begin);
    }
    // May be called once for each step of the item.
    SPLITKV_DEVICE Step next() {
        if (tile == tile_end) {
            const bool is_last = segment + 1 == segment_end;
            if (is_last) head += params.heads_per_tile;
            enter(is_last ? segment_begin : segment + 1);
        }
        const cuda::BackwardRowTile rows = params.row_tiles[tile++];
        return {rows.row_begin, rows.num_rows, head, is_masked};
    }

  private:
    SPLITKV_DEVICE void enter(int index) {
        const cuda::BackwardSegment next = params.segments[index];
        segment = index;
        tile = next.first_tile;
        tile_end = next.first_tile + next.num_tiles;
        is_masked = next.is_masked != 0;
    }

    const DkvKernelParams& params;
    const int segment_begin;
    const int segment_end;
    int head;
    int segment;
    int tile;
    int tile_end;
    bool is_masked;
};

template <typename Traits>
class DkvCta {
  public:
    using Element = typename Traits::Element;
    static constexpr int kScoreRegisters = accumulator_registers(Traits::kRows);
    static constexpr int kDkRegisters = accumulator_registers(Traits::kDkColumns);
    static constexpr int kDvRegisters = accumulator_registers(Traits::kDvColumns);

    SPLITKV_DEVICE DkvCta(const DkvKernelParams& kernel_params, DkvSmem<Traits>& shared)
        : params(kernel_params), smem(shared) {
        const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
        warp_key = warp % Traits::kKeyGroups * kMmaRows;
        column_part = warp / Traits::kKeyGroups;
        // In the order in which CTAs start: whoever waits for a turn waits for one that has
        // started.
        if (threadIdx.x == 0) smem.ticket = atomicAdd(params.counter, 1);
        __syncthreads();
        const int num_heads_kv = static_cast<int>(params.k.heads);
        const int ticket = smem.ticket;
        kv_head = params.is_head_major ? ticket / params.num_items : ticket % num_heads_kv;
        kv_tile = item().kv_tile;
        clear(dk);
        clear(dv);
    }

    SPLITKV_DEVICE void walk() {
        const cuda::BackwardItem item = this->item();
        const int num_steps = item.num_steps * (params.group / params.heads_per_tile);
        StepCursor cursor(params, item, kv_head);
        load_keys();
        Step current = cursor.next();
        load_step(current, 0);
        Step next = num_steps > 1 ? cursor.next() : current;
        for (int i = 0; i < num_steps; ++i) {
            const int stage = i % kStages;
            // Everyone sees this step's rows, and nobody reads those of the one before any more.
            ptx::cp_async_wait_group<0>();
            __syncthreads();
            Step after = next;
            if (i + 1 < num_steps) load_step(next, 1 - stage);
            if (i + 2 < num_steps) after = cursor.next();
            step(stage, current.is_masked);
            current = next;
            next = after;
        }
    }

    // Adds to dk and dv, in turn with the other parts of the same KV tile; the first part
    // overwrites them where they are not accumulated into.
    SPLITKV_DEVICE void add() {
        const cuda::BackwardItem item = this->item();
        int32_t* turn = params.part_turns + kv_head * params.num_splits + item.split;
        if (item.num_parts > 1) {
            if (threadIdx.x == 0) {
                while (ptx::ld_acquire(turn) != item.part) {
                }
            }
            __syncthreads();
        }
        write_columns(item, params.dk, params.dk_sums, params.softmax_scale,
                      column_part * Traits::kDkColumns, dk[0]);
        write_columns(item, params.dv, params.dv_sums, 1.0f, column_part * Traits::kDvColumns,
                      dv[0]);
        if (item.num_parts > 1) {
            __syncthreads();
            if (threadIdx.x == 0) ptx::st_release(turn, item.part + 1);
        }
    }

  private:
    // Read again where it is needed: kept through all steps, it would take registers.
    SPLITKV_DEVICE cuda::BackwardItem item() const {
        const int ticket = smem.ticket;
        return params.items[params.is_head_major ? ticket % params.num_items
                                                 : ticket / static_cast<int>(params.k.heads)];
    }

    SPLITKV_DEVICE void load_keys() {
        load_tile<Traits::kKeys, Traits::kHeadDimQk, Traits::kThreads>(ptx::smem_address(smem.k),
                                                                       keys_of(params.k));
        load_tile<Traits::kKeys, Traits::kHeadDimV, Traits::kThreads>(ptx::smem_address(smem.v),
                                                                      keys_of(params.v));
    }
    SPLITKV_DEVICE HeadRows<Element> keys_of(const Rows& tensor) {
        const int first_key = kv_tile * Traits::kKeys;
        return {static_cast<const Element*>(tensor.data) + first_key * tensor.row_stride +
                    kv_head * tensor.head_stride,
                tensor.row_stride, static_cast<int>(tensor.rows) - first_key};
    }

    SPLITKV_DEVICE void load_step(const Step& step, int stage) {
        load_tile<Traits::kRows, Traits::kHeadDimQk, Traits::kThreads>(
            ptx::smem_address(smem.q[stage]), rows_of(params.q, step));
        load_tile<Traits::kRows, Traits::kHeadDimV, Traits::kThreads>(
            ptx::smem_address(smem.dout[stage]), rows_of(params.dout, step));
        load_row_values(step, stage);
        ptx::cp_async_commit_group();
    }
    SPLITKV_DEVICE PackedRows<Element> rows_of(const Rows& tensor, const Step& step) {
        return {static_cast<const Element*>(tensor.data) + step.row_begin * tensor.row_stride +
                    step.first_head * tensor.head_stride,
                tensor.row_stride, tensor.head_stride, step.num_rows, params.heads_per_tile};
    }

    // One value for each thread: which of the four arrays, and which row.
    SPLITKV_DEVICE void load_row_values(const Step& step, int stage) {
        const int array = static_cast<int>(threadIdx.x) / Traits::kRows;
        const int m = static_cast<int>(threadIdx.x) % Traits::kRows;
        if (array >= 4) return;
        const PackedRows<Element> tile = rows_of(params.q, step);
        const bool is_read = tile.contains(m);
        const int row = tile.row_of(m);
        const int head = step.first_head + m - row * params.heads_per_tile;
        const int64_t index = step.row_begin + (is_read ? row : 0);
        const Rows& statistic = array == 0 ? params.lse : params.delta;
        const void* source = static_cast<const float*>(statistic.data) +
                             index * statistic.row_stride + head * statistic.head_stride;
        if (array >= 2) source = (array == 2 ? params.kv_begin : params.kv_end) + index;
        // The arrays lie one behind the other.
        ptx::cp_async_4(ptx::smem_address(smem.rows[stage].lse + threadIdx.x), source, is_read);
    }

    SPLITKV_DEVICE void step(int stage, bool is_masked) {
        const uint32_t q_tile = ptx::smem_address(smem.q[stage]);
        const uint32_t dout_tile = ptx::smem_address(smem.dout[stage]);
        float p[1][kScoreRegisters];   // scores first
        float ds[1][kScoreRegisters];  // v . dout first
        clear(p);
        clear(ds);
        multiply_rows<Element, Traits::kHeadDimQk>(
            row_reader<Traits::kKeys>(ptx::smem_address(smem.k), warp_key),
            transposed_reader<Traits::kRows>(q_tile), p);
        multiply_rows<Element, Traits::kHeadDimV>(
            row_reader<Traits::kKeys>(ptx::smem_address(smem.v), warp_key),
            transposed_reader<Traits::kRows>(dout_tile), ds);
        if (is_masked) mask(smem.rows[stage], p[0]);
        differentiate(smem.rows[stage], p[0], ds[0]);
        uint32_t packed[1][kScoreRegisters / 8][4];
        pack<Element>(p, packed);
        multiply_columns<Element>(packed, columns_reader<Traits::kDvColumns>(dout_tile), dv);
        pack<Element>(ds, packed);
        multiply_columns<Element>(packed, columns_reader<Traits::kDkColumns>(q_tile), dk);
    }
    // This warp's columns of a tile.
    template <int kColumns>
    SPLITKV_DEVICE TileReader<Traits::kRows> columns_reader(uint32_t tile) {
        constexpr int kPartBytes = tile_bytes(Traits::kRows, kColumns);
        return row_reader<Traits::kRows>(tile + column_part * kPartBytes);
    }

    // Sets scores of hidden pairs to -inf. Here keys are rows of the accumulator, rows its columns.
    SPLITKV_DEVICE void mask(const StepRows<Traits>& rows, float (&s)[kScoreRegisters]) {
        const int key = kv_tile * Traits::kKeys + warp_key + first_row_of_lane();
#pragma unroll
        for (int j = 0; j < kScoreRegisters / 4; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int column = 8 * j + first_column_of_lane() + e;
                const int begin = rows.begin[column];
                const int end = rows.end[column];
#pragma unroll
                for (int half = 0; half < kRowsPerThread; ++half) {
                    if (key + 8 * half < begin || key + 8 * half >= end) {
                        s[4 * j + 2 * half + e] = -INFINITY;
                    }
                }
            }
        }
    }

    // Scores to probabilities, and their gradients to those of the scores.
    SPLITKV_DEVICE void differentiate(const StepRows<Traits>& rows, float (&p)[kScoreRegisters],
                                      float (&ds)[kScoreRegisters]) {
#pragma unroll
        for (int j = 0; j < kScoreRegisters / 4; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int column = 8 * j + first_column_of_lane() + e;
                const float shift =
                    exponent_shift(rows.lse[column], rows.begin[column] < rows.end[column]);
                // delta of a row without keys may be anything.
                const float delta = shift == INFINITY ? 0.0f : rows.delta[column];
#pragma unroll
                for (int half = 0; half < kRowsPerThread; ++half) {
                    const int i = 4 * j + 2 * half + e;
                    p[i] = ptx::ex2_approx(fmaf(p[i], params.scale_log2, -shift));
                    ds[i] = p[i] * (ds[i] - delta);
                }
            }
        }
    }

    // The item's share of one gradient: rounded to `tensor`, or added to its sums.
    template <int kRegisters>
    SPLITKV_DEVICE void write_columns(const cuda::BackwardItem& item, const Rows& tensor,
                                      const Rows& sums, float factor, int first_column,
                                      const float (&values)[kRegisters]) {
        const bool is_rounded = params.rounds != 0 && item.num_parts == 1;
        const bool adds = params.accumulates != 0 || item.part > 0;
        const Rows& target = is_rounded ? tensor : sums;
        const int tile = params.rounds != 0 && !is_rounded ? item.split : item.kv_tile;
#pragma unroll
        for (int half = 0; half < kRowsPerThread; ++half) {
            const int64_t row = tile * Traits::kKeys + warp_key + first_row_of_lane() + 8 * half;
            if (row >= target.rows) continue;
            const int64_t offset = row * target.row_stride + kv_head * target.head_stride +
                                   first_column + first_column_of_lane();
#pragma unroll
            for (int j = 0; j < kRegisters / 4; ++j) {
                const float x = __fmul_rn(factor, values[4 * j + 2 * half]);
                const float y = __fmul_rn(factor, values[4 * j + 2 * half + 1]);
                if (is_rounded) {
                    auto* pair = static_cast<Element*>(target.data) + offset + 8 * j;
                    *reinterpret_cast<uint32_t*>(pair) = ptx::cvt_rn_x2<Element>(x, y);
                } else {
                    auto* pair = reinterpret_cast<float2*>(static_cast<float*>(target.data) +
                                                           offset + 8 * j);
                    // Another SM may have written it.
                    const float2 sum = adds ? __ldcg(pair) : float2{0.0f, 0.0f};
                    // Not fused: the same bits as adding to zero and then to the sum.
                    *pair = {__fadd_rn(sum.x, x), __fadd_rn(sum.y, y)};
                }
            }
        }
    }

    const DkvKernelParams& params;
    DkvSmem<Traits>& smem;
    int kv_head;
    int kv_tile;
    int warp_key;     // first key of this warp in the tile
    int column_part;  // of dk and dv
    float dk[1][kDkRegisters];
    float dv[1][kDvRegisters];
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    dkv_kernel(const __grid_constant__ DkvKernelParams params) {
    static_assert(sizeof(DkvSmem<Traits>) <= kMaxSmemBytes,
                  "more shared memory than a CTA has on every card");
    extern __shared__ __align__(kChunkRowBytes) uint8_t raw_smem[];
    DkvCta<Traits> cta(params, *reinterpret_cast<DkvSmem<Traits>*>(raw_smem));
    cta.walk();
    cta.add();
}

template <typename Traits>
void launch_dkv_kernel(const BackwardParams& params, const BackwardWorkArrays& work,
                       const cuda::BackwardWorkShape& shape, const BackwardWorkspace& workspace) {
    DkvKernelParams kernel_params{};
    kernel_params.dout = params.dout;
    kernel_params.q = params.q;
    kernel_params.k = params.k;
    kernel_params.v = params.v;
    kernel_params.lse = params.lse;
    kernel_params.delta = params.delta;
    kernel_params.dk = params.dk;
    kernel_params.dv = params.dv;
    kernel_params.dk_sums = workspace.dk_sums;
    kernel_params.dv_sums = workspace.dv_sums;
    kernel_params.kv_begin = params.kv_begin;
    kernel_params.kv_end = params.kv_end;
    kernel_params.items = work.items;
    kernel_params.row_tiles = work.row_tiles;
    kernel_params.segments = work.segments;
    kernel_params.counter = workspace.counter;
    kernel_params.part_turns = workspace.part_turns;
    kernel_params.num_items = static_cast<int32_t>(shape.num_items);
    kernel_params.num_splits = static_cast<int32_t>(shape.num_splits);
    kernel_params.heads_per_tile = static_cast<int32_t>(shape.heads_per_tile);
    kernel_params.group = static_cast<int32_t>(params.q.heads / params.k.heads);
    kernel_params.is_head_major = static_cast<int32_t>(shape.is_head_major);
    kernel_params.accumulates = static_cast<int32_t>(params.accumulates);
    kernel_params.rounds = static_cast<int32_t>(params.dk.dtype != DType::kFloat32);
    kernel_params.softmax_scale = params.softmax_scale;
    kernel_params.scale_log2 = params.softmax_scale * kLog2E;
    cuda::LaunchConfig config{};
    config.grid = dim3(static_cast<unsigned>(shape.num_items * params.k.heads));
    config.block = dim3(Traits::kThreads);
    config.cluster = cuda::no_cluster();
    config.smem_bytes = sizeof(DkvSmem<Traits>);
    config.stream = static_cast<cudaStream_t>(params.launch.stream);
    cuda::launch(dkv_kernel<Traits>, config, kernel_params);
}

}  // namespace splitkv::sm80
