// Names only, as in bindings.cpp: what is of the CUDA backend alone, and the work lists it runs on.
#include "attention/bindings_cuda.h"

#include <pybind11/stl.h>

#include <cstring>
#include <vector>

#include "attention/fields.h"
#include "attention/work_shape.h"
#include "cuda/backend.h"
#include "cuda/backward_work.h"
#include "cuda/family.h"
#include "cuda/forward_work.h"

namespace splitkv {
namespace {

// The parts of a list, in the order in which the kernels find them on the device.
template <typename Visit>
void visit_parts(const cuda::ForwardWork& work, Visit visit) {
    visit(work.items);
    visit(work.merge_rows);
}

template <typename Visit>
void visit_parts(const cuda::BackwardWork& work, Visit visit) {
    visit(work.items);
    visit(work.row_tiles);
    visit(work.segments);
    visit(work.dq_items);
    visit(work.dq_merge_rows);
    visit(work.unseen_kv_tiles);
    visit(work.split_kv_tiles);
}

template <typename Record>
size_t num_bytes(const std::vector<Record>& records) {
    return records.size() * sizeof(Record);
}

template <typename Work>
size_t num_ints_of(const Work& work) {
    size_t bytes = 0;
    visit_parts(work, [&](const auto& records) { bytes += num_bytes(records); });
    return bytes / sizeof(int32_t);
}

template <typename Work>
void write(const Work& work, uintptr_t address) {
    char* target = as_pointer<char>(address);
    visit_parts(work, [&](const auto& records) {
        if (!records.empty()) std::memcpy(target, records.data(), num_bytes(records));
        target += num_bytes(records);
    });
}

template <typename Work, typename Request, typename... Fields>
void bind_work(py::module_& m, const char* name, Work (*build)(const Request&), Fields... more) {
    py::class_<Work> bound(m, name);
    def_init<release_gil>(
        bound, build, Field("kv_begin", &Request::kv_begin), Field("kv_end", &Request::kv_end),
        Field("num_rows", &Request::num_rows), Field("num_keys", &Request::num_keys),
        Field("num_heads_q", &Request::num_heads_q), Field("num_heads_kv", &Request::num_heads_kv),
        Field("head_dim_qk", &Request::head_dim_qk), Field("head_dim_v", &Request::head_dim_v),
        Field("num_sms", &Request::num_sms), Field("family", &Request::family), more...);
    bound.def_property_readonly("num_ints", &num_ints_of<Work>)
        .def("write", &write<Work>, py::arg("target"))
        .def_property_readonly("shape", [](const Work& work) { return shape_to_ints(work.shape); });
}

struct RowDotCall {
    Rows a;
    Rows b;
    Rows sums;
    Launch launch;
};

void row_dot(const RowDotCall& call) { cuda::row_dot(call.a, call.b, call.sums, call.launch); }

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
    bind_work(m, "ForwardWork", &cuda::build_forward_work);
    bind_work(m, "BackwardWork", &cuda::build_backward_work,
              Field("is_deterministic", &cuda::BackwardWorkRequest::is_deterministic));
    def(m, "cuda_row_dot", &row_dot, Field("a", &RowDotCall::a), Field("b", &RowDotCall::b),
        Field("sums", &RowDotCall::sums), Field("launch", &RowDotCall::launch));
}

}  // namespace splitkv
