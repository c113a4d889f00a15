// Forward of partial attention on CUDA: its own checks, workspace, the kernel, and the join of
// split rows.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/backend.h"
#include "cuda/launch.h"
#include "cuda/merge.cuh"
#include "cuda/sm80/partial_fwd.h"
#include "cuda/sm90/partial_fwd.h"

namespace splitkv::cuda {
namespace {

constexpr int64_t kAlignment = 256;  // bytes; of each array in the workspace

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Offsets of the arrays in the workspace, in bytes from its first aligned address.
struct WorkspaceLayout {
    int64_t part_out;
    int64_t part_lse;
    int64_t counter;
    int64_t end;
};

WorkspaceLayout workspace_layout(const ForwardWorkShape& shape) {
    const int64_t num_lse = shape.num_part_rows * shape.num_heads_q;
    WorkspaceLayout layout{};
    layout.part_lse = aligned(num_lse * shape.head_dim_v * static_cast<int64_t>(sizeof(float)));
    layout.counter = layout.part_lse + aligned(num_lse * static_cast<int64_t>(sizeof(float)));
    layout.end = layout.counter + kAlignment;
    return layout;
}

// Contiguous rows of partials.
Rows float_rows(char* data, const ForwardWorkShape& shape, int64_t dim) {
    Rows rows{};
    rows.data = data;
    rows.dtype = DType::kFloat32;
    rows.rows = shape.num_part_rows;
    rows.heads = shape.num_heads_q;
    rows.dim = dim;
    rows.row_stride = shape.num_heads_q * dim;
    rows.head_stride = dim;
    return rows;
}

void check_call(const ForwardParams& params, const ForwardWorkShape& shape) {
    const Rows& q = params.q;
    SPLITKV_CHECK(q.dtype != DType::kFloat32, "q is float32, needs bfloat16 or float16 on CUDA");
    SPLITKV_CHECK(params.softmax_scale > 0.0f, "softmax_scale=", params.softmax_scale,
                  " must be positive on CUDA");
    SPLITKV_CHECK(shape.num_rows == q.rows && shape.num_keys == params.k.rows &&
                      shape.num_heads_q == q.heads && shape.num_heads_kv == params.k.heads &&
                      shape.head_dim_qk == q.dim && shape.head_dim_v == params.v.dim,
                  "the work list was made for ", shape.num_rows, " rows, ", shape.num_keys,
                  " keys, ", shape.num_heads_q, "/", shape.num_heads_kv, " heads, head dims (",
                  shape.head_dim_qk, ", ", shape.head_dim_v, "), but q is [", q.rows, ", ", q.heads,
                  ", ", q.dim, "] and v is [", params.k.rows, ", ", params.k.heads, ", ",
                  params.v.dim, "]");
    SPLITKV_CHECK(params.launch.workspace_bytes >= forward_workspace_bytes(shape),
                  "workspace holds ", params.launch.workspace_bytes, " bytes, needs ",
                  forward_workspace_bytes(shape));
}

void launch_sm90(const ForwardParams& params, const ForwardItem* items,
                 const ForwardWorkShape& shape, const sm90::ForwardWorkspace& workspace) {
    if (params.q.dtype == DType::kBFloat16) {
        sm90::launch_forward_of<__nv_bfloat16>(params, items, shape, workspace);
    } else {
        sm90::launch_forward_of<__half>(params, items, shape, workspace);
    }
}

void launch_sm80(const ForwardParams& params, const ForwardItem* items,
                 const ForwardWorkShape& shape, const sm80::ForwardParts& parts) {
    if (params.q.dtype == DType::kBFloat16) {
        sm80::launch_forward_of<__nv_bfloat16>(params, items, shape, parts);
    } else {
        sm80::launch_forward_of<__half>(params, items, shape, parts);
    }
}

}  // namespace

bool is_built() { return true; }

int64_t forward_workspace_bytes(const ForwardWorkShape& shape) {
    return workspace_layout(shape).end + kAlignment;
}

void forward(const ForwardParams& params, const int32_t* work, const ForwardWorkShape& shape) {
    check_call(params, shape);
    if (shape.num_items * params.q.heads == 0) return;
    const DeviceGuard guard(params.launch.device_index);
    const WorkspaceLayout layout = workspace_layout(shape);
    char* base = reinterpret_cast<char*>(
        aligned(static_cast<int64_t>(reinterpret_cast<uintptr_t>(params.launch.workspace))));
    const Rows part_out = float_rows(base + layout.part_out, shape, shape.head_dim_v);
    const Rows part_lse = float_rows(base + layout.part_lse, shape, 1);
    const auto* items = reinterpret_cast<const ForwardItem*>(work);
    if (static_cast<Family>(shape.family) == Family::kSm90) {
        launch_sm90(params, items, shape,
                    {part_out, part_lse, reinterpret_cast<int32_t*>(base + layout.counter)});
    } else {
        launch_sm80(params, items, shape, {part_out, part_lse});
    }
    const auto* merge_rows = reinterpret_cast<const MergeRow*>(items + shape.num_items);
    merge_split_rows(params.out, params.lse, part_out, part_lse, merge_rows, shape.num_merge_rows,
                     params.launch.stream);
}

}  // namespace splitkv::cuda
