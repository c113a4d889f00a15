// Names only: every function takes what attention/params.h declares, by keyword.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "attention/api.h"
#include "attention/bindings_cuda.h"
#include "cpu/backend.h"

namespace py = pybind11;

namespace {

using splitkv::AddParams;
using splitkv::as_pointer;
using splitkv::BackwardParams;
using splitkv::Device;
using splitkv::DType;
using splitkv::EncodeParams;
using splitkv::ForwardParams;
using splitkv::Launch;
using splitkv::MergeParams;
using splitkv::Rows;

void bind_structs(py::module_& m) {
    py::enum_<DType>(m, "DType")
        .value("float32", DType::kFloat32)
        .value("bfloat16", DType::kBFloat16)
        .value("float16", DType::kFloat16);
    py::enum_<Device>(m, "Device").value("cpu", Device::kCpu).value("cuda", Device::kCuda);

    py::class_<Rows>(m, "Rows").def(
        py::init([](uintptr_t data, DType dtype, int64_t rows, int64_t heads, int64_t dim,
                    int64_t row_stride, int64_t head_stride) {
            Rows tensor{};
            tensor.data = as_pointer<void>(data);
            tensor.dtype = dtype;
            tensor.rows = rows;
            tensor.heads = heads;
            tensor.dim = dim;
            tensor.row_stride = row_stride;
            tensor.head_stride = head_stride;
            return tensor;
        }),
        py::kw_only(), py::arg("data"), py::arg("dtype"), py::arg("rows"), py::arg("heads"),
        py::arg("dim"), py::arg("row_stride"), py::arg("head_stride"));

    py::class_<Launch>(m, "Launch")
        .def(py::init([](Device device, uintptr_t stream, uintptr_t workspace,
                         int64_t workspace_bytes, int32_t num_threads, int32_t device_index) {
                 Launch launch{};
                 launch.device = device;
                 launch.stream = as_pointer<void>(stream);
                 launch.workspace = as_pointer<void>(workspace);
                 launch.workspace_bytes = workspace_bytes;
                 launch.num_threads = num_threads;
                 launch.device_index = device_index;
                 return launch;
             }),
             py::kw_only(), py::arg("device"), py::arg("stream"), py::arg("workspace"),
             py::arg("workspace_bytes"), py::arg("num_threads"), py::arg("device_index"));
}

void bind_ops(py::module_& m) {
    using release_gil = py::call_guard<py::gil_scoped_release>;
    m.def("forward_workspace_bytes", &splitkv::forward_workspace_bytes, py::kw_only(),
          py::arg("head_dim_qk"), py::arg("head_dim_v"), py::arg("num_threads"));
    m.def("backward_workspace_bytes", &splitkv::backward_workspace_bytes, py::kw_only(),
          py::arg("head_dim_qk"), py::arg("head_dim_v"), py::arg("num_threads"));
    m.def(
        "forward",
        [](const Rows& q, const Rows& k, const Rows& v, uintptr_t kv_begin, uintptr_t kv_end,
           const Rows& out, const Rows& lse, float softmax_scale, const Launch& launch) {
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
            splitkv::forward(params);
        },
        py::kw_only(), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("kv_begin"),
        py::arg("kv_end"), py::arg("out"), py::arg("lse"), py::arg("softmax_scale"),
        py::arg("launch"), release_gil());
    m.def(
        "backward",
        [](const Rows& dout, const Rows& q, const Rows& k, const Rows& v, const Rows& lse,
           const Rows& delta, uintptr_t kv_begin, uintptr_t kv_end, const Rows& dq, const Rows& dk,
           const Rows& dv, float softmax_scale, const Launch& launch) {
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
            params.softmax_scale = softmax_scale;
            params.launch = launch;
            splitkv::backward(params);
        },
        py::kw_only(), py::arg("dout"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("lse"),
        py::arg("delta"), py::arg("kv_begin"), py::arg("kv_end"), py::arg("dq"), py::arg("dk"),
        py::arg("dv"), py::arg("softmax_scale"), py::arg("launch"), release_gil());
    m.def(
        "merge",
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
            splitkv::merge(params);
        },
        py::kw_only(), py::arg("out"), py::arg("lse"), py::arg("part_out"), py::arg("part_lse"),
        py::arg("part_scale").none(true), py::arg("part_ptr"), py::arg("part_slots"),
        py::arg("num_slots"), py::arg("launch"), release_gil());
    m.def(
        "add",
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
            splitkv::add(params);
        },
        py::kw_only(), py::arg("total"), py::arg("parts"), py::arg("part_scale").none(true),
        py::arg("part_ptr"), py::arg("part_slots"), py::arg("num_slots"), py::arg("launch"),
        release_gil());
    m.def(
        "encode",
        [](const Rows& values, const Rows& encoded, const Rows& scale, const Launch& launch) {
            EncodeParams params{};
            params.values = values;
            params.encoded = encoded;
            params.scale = scale;
            params.launch = launch;
            splitkv::encode(params);
        },
        py::kw_only(), py::arg("values"), py::arg("encoded"), py::arg("scale"), py::arg("launch"),
        release_gil());
}

}  // namespace

PYBIND11_MODULE(_kernels, m) {
    m.doc() =
        "Attention kernels of megatron_splitkv: partial forward, backward, joining of partials";
    bind_structs(m);
    bind_ops(m);
    splitkv::bind_cuda(m);
    m.def("cpu_isas", &splitkv::cpu::isa_names,
          "Instruction sets this machine can run, best first, parted by spaces");
    m.def("current_cpu_isa", &splitkv::cpu::current_isa_name, "The instruction set in use");
    m.def("force_cpu_isa", &splitkv::cpu::force_isa, py::arg("name"),
          "For debugging and tests: use this instruction set; 'auto' restores the best one");
}
