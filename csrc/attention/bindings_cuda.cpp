// Names only, as in bindings.cpp: functions of the CUDA backend, and the work lists they run on.
#include "attention/bindings_cuda.h"

#include <pybind11/stl.h>

#include <cstring>
#include <string>
#include <vector>

#include "common/check.h"
#include "cuda/backend.h"
#include "cuda/backward_work.h"
#include "cuda/family.h"
#include "cuda/forward_work.h"

namespace splitkv {
namespace {

namespace py = pybind11;
using release_gil = py::call_guard<py::gil_scoped_release>;
using cuda::BackwardWork;
using cuda::BackwardWorkRequest;
using cuda::BackwardWorkShape;
using cuda::ForwardWork;
using cuda::ForwardWorkRequest;
using cuda::ForwardWorkShape;

static_assert(sizeof(ForwardWorkShape) % sizeof(int64_t) == 0, "a struct of int64 alone");
static_assert(sizeof(BackwardWorkShape) % sizeof(int64_t) == 0, "a struct of int64 alone");

// A struct of int64 fields to a list and back: how sizes pass through an op's int[] argument.
template <typename Shape>
std::vector<int64_t> shape_to_ints(const Shape& shape) {
    std::vector<int64_t> ints(sizeof(Shape) / sizeof(int64_t));
    std::memcpy(ints.data(), &shape, sizeof(Shape));
    return ints;
}

template <typename Shape>
Shape shape_from_ints(const std::vector<int64_t>& ints) {
    Shape shape{};
    SPLITKV_CHECK(ints.size() * sizeof(int64_t) == sizeof(Shape), "work_shape has ", ints.size(),
                  " numbers, needs ", sizeof(Shape) / sizeof(int64_t), "; take it from WorkLists");
    std::memcpy(&shape, ints.data(), sizeof(Shape));
    return shape;
}

template <typename Record>
size_t num_bytes(const std::vector<Record>& records) {
    return records.size() * sizeof(Record);
}

template <typename Record>
char* append(const std::vector<Record>& records, char* target) {
    if (!records.empty()) std::memcpy(target, records.data(), num_bytes(records));
    return target + num_bytes(records);
}

int64_t num_forward_ints(const ForwardWork& work) {
    return static_cast<int64_t>((num_bytes(work.items) + num_bytes(work.merge_rows)) /
                                sizeof(int32_t));
}

void write_forward(const ForwardWork& work, uintptr_t target) {
    append(work.merge_rows, append(work.items, as_pointer<char>(target)));
}

int64_t num_backward_ints(const BackwardWork& work) {
    return static_cast<int64_t>((num_bytes(work.items) + num_bytes(work.row_tiles) +
                                 num_bytes(work.segments) + num_bytes(work.dq_items) +
                                 num_bytes(work.dq_merge_rows) + num_bytes(work.unseen_kv_tiles)) /
                                sizeof(int32_t));
}

void write_backward(const BackwardWork& work, uintptr_t target) {
    char* end = append(work.row_tiles, append(work.items, as_pointer<char>(target)));
    end = append(work.dq_merge_rows, append(work.dq_items, append(work.segments, end)));
    append(work.unseen_kv_tiles, end);
}

void bind_forward_work(py::module_& m) {
    py::class_<ForwardWork>(m, "ForwardWork")
        .def(py::init([](uintptr_t kv_begin, uintptr_t kv_end, int64_t num_rows, int64_t num_keys,
                         int64_t num_heads_q, int64_t num_heads_kv, int64_t head_dim_qk,
                         int64_t head_dim_v, int32_t num_sms, const std::string& family) {
                 ForwardWorkRequest request{};
                 request.kv_begin = as_pointer<const int32_t>(kv_begin);
                 request.kv_end = as_pointer<const int32_t>(kv_end);
                 request.num_rows = num_rows;
                 request.num_keys = num_keys;
                 request.num_heads_q = num_heads_q;
                 request.num_heads_kv = num_heads_kv;
                 request.head_dim_qk = head_dim_qk;
                 request.head_dim_v = head_dim_v;
                 request.num_sms = num_sms;
                 request.family = cuda::family_from_name(family);
                 return cuda::build_forward_work(request);
             }),
             py::kw_only(), py::arg("kv_begin"), py::arg("kv_end"), py::arg("num_rows"),
             py::arg("num_keys"), py::arg("num_heads_q"), py::arg("num_heads_kv"),
             py::arg("head_dim_qk"), py::arg("head_dim_v"), py::arg("num_sms"), py::arg("family"),
             release_gil())
        .def_property_readonly("num_ints", &num_forward_ints)
        .def("write", &write_forward, py::arg("target"))
        .def_property_readonly("shape",
                               [](const ForwardWork& work) { return shape_to_ints(work.shape); });
}

void bind_backward_work(py::module_& m) {
    py::class_<BackwardWork>(m, "BackwardWork")
        .def(py::init([](uintptr_t kv_begin, uintptr_t kv_end, int64_t num_rows, int64_t num_keys,
                         int64_t num_heads_q, int64_t num_heads_kv, int64_t head_dim_qk,
                         int64_t head_dim_v, int32_t num_sms, bool is_deterministic,
                         const std::string& family) {
                 BackwardWorkRequest request{};
                 request.kv_begin = as_pointer<const int32_t>(kv_begin);
                 request.kv_end = as_pointer<const int32_t>(kv_end);
                 request.num_rows = num_rows;
                 request.num_keys = num_keys;
                 request.num_heads_q = num_heads_q;
                 request.num_heads_kv = num_heads_kv;
                 request.head_dim_qk = head_dim_qk;
                 request.head_dim_v = head_dim_v;
                 request.num_sms = num_sms;
                 request.family = cuda::family_from_name(family);
                 request.is_deterministic = is_deterministic;
                 return cuda::build_backward_work(request);
             }),
             py::kw_only(), py::arg("kv_begin"), py::arg("kv_end"), py::arg("num_rows"),
             py::arg("num_keys"), py::arg("num_heads_q"), py::arg("num_heads_kv"),
             py::arg("head_dim_qk"), py::arg("head_dim_v"), py::arg("num_sms"),
             py::arg("is_deterministic"), py::arg("family"), release_gil())
        .def_property_readonly("num_ints", &num_backward_ints)
        .def("write", &write_backward, py::arg("target"))
        .def_property_readonly("shape",
                               [](const BackwardWork& work) { return shape_to_ints(work.shape); });
}

void bind_kernels(py::module_& m) {
    m.def(
        "cuda_forward_workspace_bytes",
        [](const std::vector<int64_t>& work_shape) {
            return cuda::forward_workspace_bytes(shape_from_ints<ForwardWorkShape>(work_shape));
        },
        py::arg("work_shape"));
    m.def(
        "cuda_forward",
        [](const Rows& q, const Rows& k, const Rows& v, uintptr_t kv_begin, uintptr_t kv_end,
           const Rows& out, const Rows& lse, float softmax_scale, uintptr_t work,
           const std::vector<int64_t>& work_shape, const Launch& launch) {
            ForwardParams params{};
            params.q = q;
            params.k = k;
            params.v = v;
            params.kv_begin = as_pointer<const int32_t>(kv_begin);
            params.kv_end = as_pointer<const int32_t>(kv_end);
            params.out = out;
            params.lse = lse;
            params.softmax_scale = softmax_scale;
            params.launch = launch;
            cuda::forward(params, as_pointer<const int32_t>(work),
                          shape_from_ints<ForwardWorkShape>(work_shape));
        },
        py::kw_only(), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("kv_begin"),
        py::arg("kv_end"), py::arg("out"), py::arg("lse"), py::arg("softmax_scale"),
        py::arg("work"), py::arg("work_shape"), py::arg("launch"), release_gil());
    m.def(
        "cuda_backward_workspace_bytes",
        [](const std::vector<int64_t>& work_shape) {
            return cuda::backward_workspace_bytes(shape_from_ints<BackwardWorkShape>(work_shape));
        },
        py::arg("work_shape"));
    m.def(
        "cuda_backward",
        [](const Rows& dout, const Rows& q, const Rows& k, const Rows& v, const Rows& lse,
           const Rows& delta, uintptr_t kv_begin, uintptr_t kv_end, const Rows& dq, const Rows& dk,
           const Rows& dv, bool accumulates, float softmax_scale, uintptr_t work,
           const std::vector<int64_t>& work_shape, const Launch& launch) {
            BackwardParams params{};
            params.dout = dout;
            params.q = q;
            params.k = k;
            params.v = v;
            params.lse = lse;
            params.delta = delta;
            params.kv_begin = as_pointer<const int32_t>(kv_begin);
            params.kv_end = as_pointer<const int32_t>(kv_end);
            params.dq = dq;
            params.dk = dk;
            params.dv = dv;
            params.accumulates = accumulates;
            params.softmax_scale = softmax_scale;
            params.launch = launch;
            cuda::backward(params, as_pointer<const int32_t>(work),
                           shape_from_ints<BackwardWorkShape>(work_shape));
        },
        py::kw_only(), py::arg("dout"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("lse"),
        py::arg("delta"), py::arg("kv_begin"), py::arg("kv_end"), py::arg("dq"), py::arg("dk"),
        py::arg("dv"), py::arg("accumulates"), py::arg("softmax_scale"), py::arg("work"),
        py::arg("work_shape"), py::arg("launch"), release_gil());
    m.def(
        "cuda_merge",
        [](const Rows& out, const Rows& lse, const Rows& part_out, const Rows& part_lse,
           const Rows* part_scale, uintptr_t part_ptr, uintptr_t part_slots, int64_t num_slots,
           const Launch& launch) {
            MergeParams params{};
            params.out = out;
            params.lse = lse;
            params.part_out = part_out;
            params.part_lse = part_lse;
            if (part_scale != nullptr) params.part_scale = *part_scale;
            params.part_ptr = as_pointer<const int32_t>(part_ptr);
            params.part_slots = as_pointer<const int32_t>(part_slots);
            params.num_slots = num_slots;
            params.launch = launch;
            cuda::merge(params);
        },
        py::kw_only(), py::arg("out"), py::arg("lse"), py::arg("part_out"), py::arg("part_lse"),
        py::arg("part_scale").none(true), py::arg("part_ptr"), py::arg("part_slots"),
        py::arg("num_slots"), py::arg("launch"), release_gil());
    m.def(
        "cuda_add",
        [](const Rows& total, const Rows& parts, const Rows* part_scale, uintptr_t part_ptr,
           uintptr_t part_slots, int64_t num_slots, const Launch& launch) {
            AddParams params{};
            params.total = total;
            params.parts = parts;
            if (part_scale != nullptr) params.part_scale = *part_scale;
            params.part_ptr = as_pointer<const int32_t>(part_ptr);
            params.part_slots = as_pointer<const int32_t>(part_slots);
            params.num_slots = num_slots;
            params.launch = launch;
            cuda::add(params);
        },
        py::kw_only(), py::arg("total"), py::arg("parts"), py::arg("part_scale").none(true),
        py::arg("part_ptr"), py::arg("part_slots"), py::arg("num_slots"), py::arg("launch"),
        release_gil());
    m.def(
        "cuda_encode",
        [](const Rows& values, const Rows& encoded, const Rows& scale, const Launch& launch) {
            EncodeParams params{};
            params.values = values;
            params.encoded = encoded;
            params.scale = scale;
            params.launch = launch;
            cuda::encode(params);
        },
        py::kw_only(), py::arg("values"), py::arg("encoded"), py::arg("scale"), py::arg("launch"),
        release_gil());
    m.def(
        "cuda_row_dot",
        [](const Rows& a, const Rows& b, const Rows& sums, const Launch& launch) {
            cuda::row_dot(a, b, sums, launch);
        },
        py::kw_only(), py::arg("a"), py::arg("b"), py::arg("sums"), py::arg("launch"),
        release_gil());
}

}  // namespace

void bind_cuda(py::module_& m) {
    m.def("has_cuda_kernels", &cuda::is_built, "Whether this build holds CUDA kernels");
    m.def(
        "cuda_family",
        [](int major, int minor) { return cuda::family_name(cuda::family_of(major, minor)); },
        py::arg("major"), py::arg("minor"),
        "Kernels for a device of this compute capability: sm90 or sm80");
    m.def("force_cuda_family", &cuda::force_family, py::arg("name"),
          "For debugging and tests: sm80 on every device; 'auto' restores the best one");
    bind_forward_work(m);
    bind_backward_work(m);
    bind_kernels(m);
}

}  // namespace splitkv
