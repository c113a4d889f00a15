#include "attention/api.h"

#include "attention/checks.h"
#include "attention/work_shape.h"
#include "common/check.h"
#include "cpu/backend.h"
#include "cuda/backend.h"

namespace splitkv {
namespace {

using cuda::BackwardWorkShape;
using cuda::ForwardWorkShape;

bool is_cuda(Device device) { return device == Device::kCuda; }

template <typename Shape, typename Call>
Shape work_shape(const Call& call) {
    SPLITKV_CHECK(call.work != nullptr, "work is missing on CUDA; take it from WorkLists");
    return shape_from_ints<Shape>(call.work_shape);
}

void check_intervals(const int32_t* begin, const int32_t* end, int64_t rows, int64_t num_keys) {
    for (int64_t row = 0; row < rows; ++row) {
        if (begin[row] >= end[row]) continue;
        SPLITKV_CHECK(begin[row] >= 0 && end[row] <= num_keys, "row ", row, " sees keys [",
                      begin[row], ", ", end[row], "), needs a part of [0, ", num_keys, ")");
    }
}

void check_cpu_launch(const Launch& launch, int64_t workspace_bytes) {
    SPLITKV_CHECK(launch.num_threads >= 1, "num_threads=", launch.num_threads,
                  ", needs at least 1");
    SPLITKV_CHECK(launch.workspace_bytes >= workspace_bytes, "workspace holds ",
                  launch.workspace_bytes, " bytes, needs ", workspace_bytes);
}

PackParams pack_params(const PackCall& call) {
    PackParams params{};
    params.packed = call.packed;
    params.num_rows = call.num_rows;
    params.row_bytes = call.row_bytes;
    params.index = call.index;
    params.launch = call.launch;
    const size_t num_fields = call.sources.size();
    SPLITKV_CHECK(num_fields <= kMaxPackFields, "a row has ", num_fields, " fields, needs at most ",
                  kMaxPackFields);
    SPLITKV_CHECK(call.row_strides.size() == num_fields && call.begins.size() == num_fields &&
                      call.ends.size() == num_fields,
                  "sources, row_strides, begins and ends differ in length");
    int64_t end = 0;
    for (size_t i = 0; i < num_fields; ++i) {
        SPLITKV_CHECK(end <= call.begins[i] && call.begins[i] <= call.ends[i], "field ", i,
                      " lies at bytes [", call.begins[i], ", ", call.ends[i],
                      "), needs to begin at ", end, " or later");
        end = call.ends[i];
        params.fields[i] = {reinterpret_cast<const char*>(call.sources[i]), call.row_strides[i],
                            call.begins[i], end};
    }
    SPLITKV_CHECK(end <= call.row_bytes, "the last field ends at byte ", end, " of ",
                  call.row_bytes);
    params.num_fields = static_cast<int32_t>(num_fields);
    return params;
}

void check_index(const int64_t* index, int64_t num_rows, int64_t num_source_rows) {
    if (index == nullptr) return;
    for (int64_t i = 0; i < num_rows; ++i) {
        SPLITKV_CHECK(index[i] >= 0 && index[i] < num_source_rows, "rows[", i, "]=", index[i],
                      ", needs 0 to ", num_source_rows - 1);
    }
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

int64_t forward_workspace_bytes(const WorkspaceRequest& request) {
    if (is_cuda(request.device)) {
        return cuda::forward_workspace_bytes(shape_from_ints<ForwardWorkShape>(request.work_shape));
    }
    return cpu::forward_workspace_bytes(request.head_dim_qk, request.head_dim_v,
                                        request.num_threads);
}

int64_t backward_workspace_bytes(const WorkspaceRequest& request) {
    if (is_cuda(request.device)) {
        return cuda::backward_workspace_bytes(
            shape_from_ints<BackwardWorkShape>(request.work_shape), request.gradient_dtype);
    }
    return cpu::backward_workspace_bytes(request.head_dim_qk, request.head_dim_v,
                                         request.num_threads);
}

void forward(const ForwardCall& call) {
    check_forward(call);
    const Launch& launch = call.launch;
    if (is_cuda(launch.device)) {
        return cuda::forward(call, call.work, work_shape<ForwardWorkShape>(call));
    }
    check_cpu_launch(launch,
                     cpu::forward_workspace_bytes(call.q.dim, call.v.dim, launch.num_threads));
    check_intervals(call.kv_begin, call.kv_end, call.q.rows, call.k.rows);
    cpu::forward(call);
}

void backward(const BackwardCall& call) {
    check_backward(call);
    const Launch& launch = call.launch;
    if (is_cuda(launch.device)) {
        return cuda::backward(call, call.work, work_shape<BackwardWorkShape>(call));
    }
    SPLITKV_CHECK(call.accumulates, "accumulates=false, but the CPU adds to dk and dv; clear them");
    check_cpu_launch(launch,
                     cpu::backward_workspace_bytes(call.q.dim, call.v.dim, launch.num_threads));
    check_intervals(call.kv_begin, call.kv_end, call.q.rows, call.k.rows);
    cpu::backward(call);
}

void merge(const MergeParams& params) {
    check_merge(params);
    if (is_cuda(params.launch.device)) return cuda::merge(params);
    check_cpu_launch(params.launch, 0);
    check_slots(params.part_ptr, params.part_slots, params.num_slots, params.out.rows,
                params.part_out.rows);
    cpu::merge(params);
}

void add(const AddParams& params) {
    check_add(params);
    if (is_cuda(params.launch.device)) return cuda::add(params);
    check_cpu_launch(params.launch, 0);
    check_slots(params.part_ptr, params.part_slots, params.num_slots, params.total.rows,
                params.parts.rows);
    cpu::add(params);
}

void encode(const EncodeParams& params) {
    check_encode(params);
    if (is_cuda(params.launch.device)) return cuda::encode(params);
    check_cpu_launch(params.launch, 0);
    check_index(params.index, params.encoded.rows, params.values.rows);
    cpu::encode(params);
}

void pack(const PackCall& call) {
    const PackParams params = pack_params(call);
    if (is_cuda(call.launch.device)) return cuda::pack(params);
    check_cpu_launch(call.launch, 0);
    check_index(call.index, call.num_rows, call.num_source_rows);
    cpu::pack(params);
}

}  // namespace splitkv
