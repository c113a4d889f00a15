#include "attention/api.h"

#include "attention/checks.h"
#include "common/check.h"
#include "cpu/backend.h"

namespace splitkv {
namespace {

void check_intervals(const int32_t* begin, const int32_t* end, int64_t rows, int64_t num_keys) {
    for (int64_t row = 0; row < rows; ++row) {
        if (begin[row] >= end[row]) continue;
        SPLITKV_CHECK(begin[row] >= 0 && end[row] <= num_keys, "row ", row, " sees keys [",
                      begin[row], ", ", end[row], "), needs a part of [0, ", num_keys, ")");
    }
}

void check_launch(const Launch& launch, int64_t workspace_bytes) {
    SPLITKV_CHECK(launch.device == Device::kCpu,
                  "tensors are not on the CPU; call the cuda_ functions");
    SPLITKV_CHECK(launch.num_threads >= 1, "num_threads=", launch.num_threads,
                  ", needs at least 1");
    SPLITKV_CHECK(launch.workspace_bytes >= workspace_bytes, "workspace holds ",
                  launch.workspace_bytes, " bytes, needs ", workspace_bytes);
}

void check_slots(const int32_t* ptr, const int32_t* slots, int64_t num_slots, int64_t num_rows,
                 int64_t num_parts) {
    SPLITKV_CHECK(ptr[0] == 0 && ptr[num_rows] == num_slots, "part_ptr runs from ", ptr[0], " to ",
                  ptr[num_rows], ", needs 0 to ", num_slots);
    for (int64_t row = 0; row < num_rows; ++row) {
        SPLITKV_CHECK(ptr[row] <= ptr[row + 1], "part_ptr decreases at row ", row);
    }
    for (int64_t i = 0; i < num_slots; ++i) {
        SPLITKV_CHECK(slots[i] >= 0 && slots[i] < num_parts, "part_slots[", i, "]=", slots[i],
                      ", needs 0 to ", num_parts - 1);
    }
}

}  // namespace

int64_t forward_workspace_bytes(int64_t head_dim_qk, int64_t head_dim_v, int32_t num_threads) {
    return cpu::forward_workspace_bytes(head_dim_qk, head_dim_v, num_threads);
}

int64_t backward_workspace_bytes(int64_t head_dim_qk, int64_t head_dim_v, int32_t num_threads) {
    return cpu::backward_workspace_bytes(head_dim_qk, head_dim_v, num_threads);
}

void forward(const ForwardParams& params) {
    const Rows& q = params.q;
    check_inputs(q, params.k, params.v);
    check_shape("out", params.out, q.rows, q.heads, params.v.dim);
    check_shape("lse", params.lse, q.rows, q.heads, 1);
    check_float32("lse", params.lse);
    check_launch(params.launch,
                 forward_workspace_bytes(q.dim, params.v.dim, params.launch.num_threads));
    check_intervals(params.kv_begin, params.kv_end, q.rows, params.k.rows);
    cpu::forward(params);
}

void backward(const BackwardParams& params) {
    const Rows& q = params.q;
    check_inputs(q, params.k, params.v);
    check_shape("dout", params.dout, q.rows, q.heads, params.v.dim);
    check_shape("lse", params.lse, q.rows, q.heads, 1);
    check_shape("delta", params.delta, q.rows, q.heads, 1);
    check_shape("dq", params.dq, q.rows, q.heads, q.dim);
    check_shape("dk", params.dk, params.k.rows, params.k.heads, q.dim);
    check_shape("dv", params.dv, params.k.rows, params.k.heads, params.v.dim);
    check_float32("lse", params.lse);
    check_float32("delta", params.delta);
    check_float32("dq", params.dq);
    check_float32("dk", params.dk);
    check_float32("dv", params.dv);
    check_launch(params.launch,
                 backward_workspace_bytes(q.dim, params.v.dim, params.launch.num_threads));
    check_intervals(params.kv_begin, params.kv_end, q.rows, params.k.rows);
    cpu::backward(params);
}

void merge(const MergeParams& params) {
    check_merge(params);
    check_launch(params.launch, 0);
    check_slots(params.part_ptr, params.part_slots, params.num_slots, params.out.rows,
                params.part_out.rows);
    cpu::merge(params);
}

void add(const AddParams& params) {
    check_add(params);
    check_launch(params.launch, 0);
    check_slots(params.part_ptr, params.part_slots, params.num_slots, params.total.rows,
                params.parts.rows);
    cpu::add(params);
}

void encode(const EncodeParams& params) {
    check_encode(params);
    check_launch(params.launch, 0);
    cpu::encode(params);
}

}  // namespace splitkv
