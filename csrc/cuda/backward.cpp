// Backward of partial attention on CUDA: its own checks, workspace, and the kernels.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/backend.h"
#include "cuda/launch.h"
#include "cuda/operand.h"
#include "cuda/round_tiles.h"
#include "cuda/sm80/partial_bwd.h"
#include "cuda/sm80/tiles.h"
#include "cuda/sm90/partial_bwd.h"
#include "cuda/zero_tiles.h"

namespace splitkv::cuda {
namespace {

constexpr int64_t kAlignment = 256;  // bytes; of each array in the workspace

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Offsets of the arrays in the workspace, in bytes from its first aligned address. Counters come
// first, so that one memset clears them.
struct WorkspaceLayout {
    int64_t part_turns;
    int64_t dq_turns;
    int64_t counters_end;
    int64_t statistics;  // sm_90 alone, as limits
    int64_t limits;
    int64_t part_dq;  // sm_80 alone
    int64_t dk_sums;  // of split KV tiles, where dk and dv are rounded
    int64_t dv_sums;
    int64_t end;
};

bool is_sm90(const BackwardWorkShape& shape) {
    return static_cast<Family>(shape.family) == Family::kSm90;
}

int64_t keys_of_tile(const BackwardWorkShape& shape) {
    const auto head_dim_qk = static_cast<int>(shape.head_dim_qk);
    const auto head_dim_v = static_cast<int>(shape.head_dim_v);
    return is_sm90(shape) ? sm90::backward_tile(head_dim_qk, head_dim_v).keys
                          : sm80::backward_tile(head_dim_qk, head_dim_v).keys;
}

// Appends the sums of the split KV tiles, [num_splits * tile keys, Hkv, D] and [.., Hkv, Dv].
void add_sums(const BackwardWorkShape& shape, WorkspaceLayout* layout) {
    const int64_t num_vectors = shape.num_splits * keys_of_tile(shape) * shape.num_heads_kv;
    layout->dk_sums = aligned(layout->end);
    layout->dv_sums =
        layout->dk_sums + num_vectors * shape.head_dim_qk * static_cast<int64_t>(sizeof(float));
    layout->end =
        layout->dv_sums + num_vectors * shape.head_dim_v * static_cast<int64_t>(sizeof(float));
}

WorkspaceLayout workspace_layout(const BackwardWorkShape& shape, DType gradient_dtype) {
    constexpr auto kWord = static_cast<int64_t>(sizeof(int32_t));
    const bool is_rounded = gradient_dtype != DType::kFloat32;
    WorkspaceLayout layout{};
    layout.part_turns = kWord;
    layout.dq_turns = layout.part_turns + shape.num_splits * shape.num_heads_kv * kWord;
    if (!is_sm90(shape)) {
        layout.counters_end = layout.dq_turns;
        layout.part_dq = aligned(layout.counters_end);
        layout.end =
            layout.part_dq + shape.num_dq_part_rows * shape.num_heads_q * shape.head_dim_qk * kWord;
        if (is_rounded) add_sums(shape, &layout);
        return layout;
    }
    const int64_t tile_rows =
        sm90::backward_tile(static_cast<int>(shape.head_dim_qk), static_cast<int>(shape.head_dim_v))
            .rows;
    const int64_t num_tiles = shape.num_row_tiles * (shape.num_heads_q / shape.heads_per_tile);
    layout.counters_end = layout.dq_turns + (shape.is_deterministic ? num_tiles * kWord : 0);
    layout.statistics = aligned(layout.counters_end);
    layout.limits = layout.statistics + num_tiles * 2 * tile_rows * kWord;
    layout.end = layout.limits + shape.num_row_tiles * 2 * tile_rows * kWord;
    if (is_rounded) add_sums(shape, &layout);
    return layout;
}

void check_call(const BackwardParams& params, const BackwardWorkShape& shape) {
    const Rows& q = params.q;
    SPLITKV_CHECK(q.dtype != DType::kFloat32, "q is float32, needs bfloat16 or float16 on CUDA");
    SPLITKV_CHECK(params.dout.dtype == q.dtype, "dout and q differ in dtype");
    SPLITKV_CHECK(params.softmax_scale > 0.0f, "softmax_scale=", params.softmax_scale,
                  " must be positive on CUDA");
    SPLITKV_CHECK(
        q.rows <= 1 || (params.dq.head_stride == q.dim && params.dq.row_stride == q.heads * q.dim),
        "dq must be contiguous");
    SPLITKV_CHECK(shape.num_rows == q.rows && shape.num_keys == params.k.rows &&
                      shape.num_heads_q == q.heads && shape.num_heads_kv == params.k.heads &&
                      shape.head_dim_qk == q.dim && shape.head_dim_v == params.v.dim,
                  "the work list was made for ", shape.num_rows, " rows, ", shape.num_keys,
                  " keys, ", shape.num_heads_q, "/", shape.num_heads_kv, " heads, head dims (",
                  shape.head_dim_qk, ", ", shape.head_dim_v, "), but q is [", q.rows, ", ", q.heads,
                  ", ", q.dim, "] and v is [", params.k.rows, ", ", params.k.heads, ", ",
                  params.v.dim, "]");
    check_operand("dk", params.dk);
    check_operand("dv", params.dv);
    const int64_t needed_bytes = backward_workspace_bytes(shape, params.dk.dtype);
    SPLITKV_CHECK(params.launch.workspace_bytes >= needed_bytes, "workspace holds ",
                  params.launch.workspace_bytes, " bytes, needs ", needed_bytes);
}

// The parts of a BackwardWork on the device.
struct WorkArrays {
    const BackwardItem* items;
    const BackwardRowTile* row_tiles;
    const BackwardSegment* segments;
    const ForwardItem* dq_items;
    const MergeRow* dq_rows;
    const int32_t* unseen_kv_tiles;
    const int32_t* split_kv_tiles;
};

WorkArrays work_arrays(const int32_t* work, const BackwardWorkShape& shape) {
    WorkArrays arrays{};
    arrays.items = reinterpret_cast<const BackwardItem*>(work);
    arrays.row_tiles = reinterpret_cast<const BackwardRowTile*>(arrays.items + shape.num_items);
    arrays.segments =
        reinterpret_cast<const BackwardSegment*>(arrays.row_tiles + shape.num_row_tiles);
    arrays.dq_items = reinterpret_cast<const ForwardItem*>(arrays.segments + shape.num_segments);
    arrays.dq_rows = reinterpret_cast<const MergeRow*>(arrays.dq_items + shape.num_dq_items);
    arrays.unseen_kv_tiles =
        reinterpret_cast<const int32_t*>(arrays.dq_rows + shape.num_dq_merge_rows);
    arrays.split_kv_tiles = arrays.unseen_kv_tiles + shape.num_unseen_kv_tiles;
    return arrays;
}

// What the parts of a split KV tile add to, in fp32: dk or dv itself or, where it is rounded, a
// tile of the workspace for each split.
struct GradientSums {
    Rows dk;
    Rows dv;
};

Rows sums_of(const Rows& gradient, const BackwardWorkShape& shape, char* data) {
    Rows sums = gradient;
    if (gradient.dtype == DType::kFloat32) return sums;
    sums.data = data;
    sums.dtype = DType::kFloat32;
    sums.rows = shape.num_splits * keys_of_tile(shape);
    sums.row_stride = gradient.heads * gradient.dim;
    sums.head_stride = gradient.dim;
    return sums;
}

void backward_sm90(const BackwardParams& params, const WorkArrays& work,
                   const BackwardWorkShape& shape, const WorkspaceLayout& layout,
                   const GradientSums& sums, char* base) {
    // The kernels add to dq.
    const Rows& dq = params.dq;
    const auto dq_bytes = static_cast<size_t>(dq.rows * dq.heads * dq.dim) * sizeof(float);
    SPLITKV_CUDA_CHECK(
        cudaMemsetAsync(dq.data, 0, dq_bytes, static_cast<cudaStream_t>(params.launch.stream)));
    if (shape.num_items == 0) return;
    sm90::BackwardWorkspace workspace{};
    workspace.counter = reinterpret_cast<int32_t*>(base);
    workspace.part_turns = reinterpret_cast<int32_t*>(base + layout.part_turns);
    workspace.dq_turns =
        shape.is_deterministic ? reinterpret_cast<int32_t*>(base + layout.dq_turns) : nullptr;
    workspace.statistics = reinterpret_cast<float*>(base + layout.statistics);
    workspace.limits = reinterpret_cast<int32_t*>(base + layout.limits);
    workspace.dk_sums = sums.dk;
    workspace.dv_sums = sums.dv;
    const sm90::BackwardWorkArrays arrays{work.items, work.row_tiles, work.segments};
    sm90::launch_row_statistics(params, arrays, shape, workspace);
    if (params.q.dtype == DType::kBFloat16) {
        sm90::launch_backward_of<__nv_bfloat16>(params, arrays, shape, workspace);
    } else {
        sm90::launch_backward_of<__half>(params, arrays, shape, workspace);
    }
}

// The kernels write every row of dq.
void backward_sm80(const BackwardParams& params, const WorkArrays& work,
                   const BackwardWorkShape& shape, const WorkspaceLayout& layout,
                   const GradientSums& sums, char* base) {
    sm80::BackwardWorkspace workspace{};
    workspace.counter = reinterpret_cast<int32_t*>(base);
    workspace.part_turns = reinterpret_cast<int32_t*>(base + layout.part_turns);
    workspace.part_dq = params.dq;
    workspace.part_dq.data = base + layout.part_dq;
    workspace.part_dq.rows = shape.num_dq_part_rows;
    workspace.part_dq.row_stride = params.dq.heads * params.dq.dim;
    workspace.part_dq.head_stride = params.dq.dim;
    workspace.dk_sums = sums.dk;
    workspace.dv_sums = sums.dv;
    const sm80::BackwardWorkArrays arrays{work.items, work.row_tiles, work.segments, work.dq_items,
                                          work.dq_rows};
    if (params.q.dtype == DType::kBFloat16) {
        sm80::launch_backward_of<__nv_bfloat16>(params, arrays, shape, workspace);
    } else {
        sm80::launch_backward_of<__half>(params, arrays, shape, workspace);
    }
    sm80::sum_split_rows(params.dq, workspace.part_dq, arrays.dq_rows, shape.num_dq_merge_rows,
                         params.launch.stream);
}

// dk and dv of the KV tiles that have no item.
void zero_unseen_keys(const BackwardParams& params, const WorkArrays& work,
                      const BackwardWorkShape& shape) {
    for (const Rows& gradient : {params.dk, params.dv}) {
        zero_tiles(gradient, work.unseen_kv_tiles, shape.num_unseen_kv_tiles, keys_of_tile(shape),
                   params.launch.stream);
    }
}

void round_split_keys(const BackwardParams& params, const GradientSums& sums,
                      const WorkArrays& work, const BackwardWorkShape& shape) {
    const int64_t tile_keys = keys_of_tile(shape);
    round_tiles(sums.dk, params.dk, work.split_kv_tiles, shape.num_splits, tile_keys,
                params.launch.stream);
    round_tiles(sums.dv, params.dv, work.split_kv_tiles, shape.num_splits, tile_keys,
                params.launch.stream);
}

}  // namespace

int64_t backward_workspace_bytes(const BackwardWorkShape& shape, DType gradient_dtype) {
    return workspace_layout(shape, gradient_dtype).end + kAlignment;
}

void backward(const BackwardParams& params, const int32_t* work, const BackwardWorkShape& shape) {
    check_call(params, shape);
    const DeviceGuard guard(params.launch.device_index);
    const WorkArrays arrays = work_arrays(work, shape);
    if (!params.accumulates) zero_unseen_keys(params, arrays, shape);
    if (params.dq.rows * params.dq.heads == 0) return;
    const WorkspaceLayout layout = workspace_layout(shape, params.dk.dtype);
    char* base = reinterpret_cast<char*>(
        aligned(static_cast<int64_t>(reinterpret_cast<uintptr_t>(params.launch.workspace))));
    SPLITKV_CUDA_CHECK(cudaMemsetAsync(base, 0, static_cast<size_t>(layout.counters_end),
                                       static_cast<cudaStream_t>(params.launch.stream)));
    const GradientSums sums{sums_of(params.dk, shape, base + layout.dk_sums),
                            sums_of(params.dv, shape, base + layout.dv_sums)};
    if (is_sm90(shape)) {
        backward_sm90(params, arrays, shape, layout, sums, base);
    } else {
        backward_sm80(params, arrays, shape, layout, sums, base);
    }
    if (params.dk.dtype != DType::kFloat32) round_split_keys(params, sums, arrays, shape);
}

}  // namespace splitkv::cuda
