// Backward of partial attention on CUDA: checks, workspace, and the kernels.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/checks.h"
#include "cuda/backend.h"
#include "cuda/launch.h"
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
    int64_t end;
};

bool is_sm90(const BackwardWorkShape& shape) {
    return static_cast<Family>(shape.family) == Family::kSm90;
}

WorkspaceLayout workspace_layout(const BackwardWorkShape& shape) {
    constexpr auto kWord = static_cast<int64_t>(sizeof(int32_t));
    WorkspaceLayout layout{};
    layout.part_turns = kWord;
    layout.dq_turns = layout.part_turns + shape.num_splits * shape.num_heads_kv * kWord;
    if (!is_sm90(shape)) {
        layout.counters_end = layout.dq_turns;
        layout.part_dq = aligned(layout.counters_end);
        layout.end =
            layout.part_dq + shape.num_dq_part_rows * shape.num_heads_q * shape.head_dim_qk * kWord;
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
    return layout;
}

void check_rows(const BackwardParams& params) {
    const Rows& q = params.q;
    check_inputs(q, params.k, params.v);
    check_shape("dout", params.dout, q.rows, q.heads, params.v.dim);
    check_shape("lse", params.lse, q.rows, q.heads, 1);
    check_shape("delta", params.delta, q.rows, q.heads, 1);
    check_shape("dq", params.dq, q.rows, q.heads, q.dim);
    check_shape("dk", params.dk, params.k.rows, params.k.heads, q.dim);
    check_shape("dv", params.dv, params.k.rows, params.k.heads, params.v.dim);
    for (const auto& [name, tensor] : {std::pair<const char*, const Rows&>{"lse", params.lse},
                                       {"delta", params.delta},
                                       {"dq", params.dq},
                                       {"dk", params.dk},
                                       {"dv", params.dv}}) {
        check_float32(name, tensor);
    }
    SPLITKV_CHECK(q.dtype != DType::kFloat32, "q is float32, needs bfloat16 or float16 on CUDA");
    SPLITKV_CHECK(params.dout.dtype == q.dtype, "dout and q differ in dtype");
    SPLITKV_CHECK(params.softmax_scale > 0.0f, "softmax_scale=", params.softmax_scale,
                  " must be positive on CUDA");
    SPLITKV_CHECK(
        q.rows <= 1 || (params.dq.head_stride == q.dim && params.dq.row_stride == q.heads * q.dim),
        "dq must be contiguous");
}

void check_call(const BackwardParams& params, const BackwardWorkShape& shape) {
    check_rows(params);
    const Rows& q = params.q;
    SPLITKV_CHECK(shape.num_rows == q.rows && shape.num_keys == params.k.rows &&
                      shape.num_heads_q == q.heads && shape.num_heads_kv == params.k.heads &&
                      shape.head_dim_qk == q.dim && shape.head_dim_v == params.v.dim,
                  "the work list was made for ", shape.num_rows, " rows, ", shape.num_keys,
                  " keys, ", shape.num_heads_q, "/", shape.num_heads_kv, " heads, head dims (",
                  shape.head_dim_qk, ", ", shape.head_dim_v, "), but q is [", q.rows, ", ", q.heads,
                  ", ", q.dim, "] and v is [", params.k.rows, ", ", params.k.heads, ", ",
                  params.v.dim, "]");
    SPLITKV_CHECK(params.launch.workspace_bytes >= backward_workspace_bytes(shape),
                  "workspace holds ", params.launch.workspace_bytes, " bytes, needs ",
                  backward_workspace_bytes(shape));
}

// The parts of a BackwardWork on the device.
struct WorkArrays {
    const BackwardItem* items;
    const BackwardRowTile* row_tiles;
    const BackwardSegment* segments;
    const ForwardItem* dq_items;
    const MergeRow* dq_rows;
    const int32_t* unseen_kv_tiles;
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
    return arrays;
}

void backward_sm90(const BackwardParams& params, const WorkArrays& work,
                   const BackwardWorkShape& shape, const WorkspaceLayout& layout, char* base) {
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
                   const BackwardWorkShape& shape, const WorkspaceLayout& layout, char* base) {
    sm80::BackwardWorkspace workspace{};
    workspace.counter = reinterpret_cast<int32_t*>(base);
    workspace.part_turns = reinterpret_cast<int32_t*>(base + layout.part_turns);
    workspace.part_dq = params.dq;
    workspace.part_dq.data = base + layout.part_dq;
    workspace.part_dq.rows = shape.num_dq_part_rows;
    workspace.part_dq.row_stride = params.dq.heads * params.dq.dim;
    workspace.part_dq.head_stride = params.dq.dim;
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

int64_t keys_of_tile(const BackwardWorkShape& shape) {
    const auto head_dim_qk = static_cast<int>(shape.head_dim_qk);
    const auto head_dim_v = static_cast<int>(shape.head_dim_v);
    return is_sm90(shape) ? sm90::backward_tile(head_dim_qk, head_dim_v).keys
                          : sm80::backward_tile(head_dim_qk, head_dim_v).keys;
}

// dk and dv of the KV tiles that have no item.
void zero_unseen_keys(const BackwardParams& params, const WorkArrays& work,
                      const BackwardWorkShape& shape) {
    for (const Rows& gradient : {params.dk, params.dv}) {
        zero_tiles(gradient, work.unseen_kv_tiles, shape.num_unseen_kv_tiles, keys_of_tile(shape),
                   params.launch.stream);
    }
}

}  // namespace

int64_t backward_workspace_bytes(const BackwardWorkShape& shape) {
    return workspace_layout(shape).end + kAlignment;
}

void backward(const BackwardParams& params, const int32_t* work, const BackwardWorkShape& shape) {
    check_call(params, shape);
    const DeviceGuard guard(params.launch.device_index);
    const WorkArrays arrays = work_arrays(work, shape);
    if (!params.accumulates) zero_unseen_keys(params, arrays, shape);
    if (params.dq.rows * params.dq.heads == 0) return;
    const WorkspaceLayout layout = workspace_layout(shape);
    char* base = reinterpret_cast<char*>(
        aligned(static_cast<int64_t>(reinterpret_cast<uintptr_t>(params.launch.workspace))));
    SPLITKV_CUDA_CHECK(cudaMemsetAsync(base, 0, static_cast<size_t>(layout.counters_end),
                                       static_cast<cudaStream_t>(params.launch.stream)));
    if (is_sm90(shape)) {
        backward_sm90(params, arrays, shape, layout, base);
    } else {
        backward_sm80(params, arrays, shape, layout, base);
    }
}

}  // namespace splitkv::cuda
