// Names only: every function takes the fields of a struct of params.h or api.h, by keyword.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "attention/api.h"
#include "attention/bindings_cuda.h"
#include "attention/fields.h"
#include "cpu/backend.h"

namespace splitkv {
namespace {

template <typename Struct>
Struct copy(const Struct& value) {
    return value;
}

void bind_structs(py::module_& m) {
    py::enum_<DType>(m, "DType")
        .value("float32", DType::kFloat32)
        .value("bfloat16", DType::kBFloat16)
        .value("float16", DType::kFloat16);
    py::enum_<Device>(m, "Device").value("cpu", Device::kCpu).value("cuda", Device::kCuda);
    // By position: made a dozen times a call, where a keyword costs more than its value.
    py::class_<Rows>(m, "Rows").def(py::init(&rows_at), py::arg("address"), py::arg("dtype"),
                                    py::arg("shape"), py::arg("strides"));
    py::class_<Launch> launch(m, "Launch");
    def_init<keep_gil>(
        launch, &copy<Launch>, Field("device", &Launch::device), Field("stream", &Launch::stream),
        Field("workspace", &Launch::workspace), Field("workspace_bytes", &Launch::workspace_bytes),
        Field("num_threads", &Launch::num_threads), Field("device_index", &Launch::device_index));
}

void bind_attention(py::module_& m) {
    const auto def_workspace = [&m](const char* name, auto function, auto... more) {
        def(m, name, function, Field("device", &WorkspaceRequest::device),
            Field("head_dim_qk", &WorkspaceRequest::head_dim_qk),
            Field("head_dim_v", &WorkspaceRequest::head_dim_v),
            Field("num_threads", &WorkspaceRequest::num_threads),
            Field("work_shape", &WorkspaceRequest::work_shape), more...);
    };
    def_workspace("forward_workspace_bytes", &forward_workspace_bytes);
    def_workspace("backward_workspace_bytes", &backward_workspace_bytes,
                  Field("gradient_dtype", &WorkspaceRequest::gradient_dtype));
    def(m, "forward", &forward, Field("q", &ForwardCall::q), Field("k", &ForwardCall::k),
        Field("v", &ForwardCall::v), Field("kv_begin", &ForwardCall::kv_begin),
        Field("kv_end", &ForwardCall::kv_end), Field("out", &ForwardCall::out),
        Field("lse", &ForwardCall::lse), Field("softmax_scale", &ForwardCall::softmax_scale),
        Field("work", &ForwardCall::work), Field("work_shape", &ForwardCall::work_shape),
        Field("launch", &ForwardCall::launch));
    def(m, "backward", &backward, Field("dout", &BackwardCall::dout), Field("q", &BackwardCall::q),
        Field("k", &BackwardCall::k), Field("v", &BackwardCall::v),
        Field("lse", &BackwardCall::lse), Field("delta", &BackwardCall::delta),
        Field("kv_begin", &BackwardCall::kv_begin), Field("kv_end", &BackwardCall::kv_end),
        Field("dq", &BackwardCall::dq), Field("dk", &BackwardCall::dk),
        Field("dv", &BackwardCall::dv), Field("accumulates", &BackwardCall::accumulates),
        Field("softmax_scale", &BackwardCall::softmax_scale), Field("work", &BackwardCall::work),
        Field("work_shape", &BackwardCall::work_shape), Field("launch", &BackwardCall::launch));
}

void bind_partials(py::module_& m) {
    constexpr bool kOptional = true;
    def(m, "merge", &merge, Field("out", &MergeParams::out), Field("lse", &MergeParams::lse),
        Field("part_out", &MergeParams::part_out), Field("part_lse", &MergeParams::part_lse),
        Field("part_scale", &MergeParams::part_scale, kOptional),
        Field("part_ptr", &MergeParams::part_ptr), Field("part_slots", &MergeParams::part_slots),
        Field("num_slots", &MergeParams::num_slots),
        Field("accumulates", &MergeParams::accumulates), Field("launch", &MergeParams::launch));
    def(m, "add", &add, Field("total", &AddParams::total), Field("parts", &AddParams::parts),
        Field("part_scale", &AddParams::part_scale, kOptional),
        Field("part_ptr", &AddParams::part_ptr), Field("part_slots", &AddParams::part_slots),
        Field("num_slots", &AddParams::num_slots), Field("accumulates", &AddParams::accumulates),
        Field("launch", &AddParams::launch));
    def(m, "encode", &encode, Field("values", &EncodeParams::values),
        Field("index", &EncodeParams::index), Field("encoded", &EncodeParams::encoded),
        Field("scale", &EncodeParams::scale), Field("lse", &EncodeParams::lse, kOptional),
        Field("sent_lse", &EncodeParams::sent_lse, kOptional),
        Field("launch", &EncodeParams::launch));
    def(m, "pack", &pack, Field("packed", &PackCall::packed),
        Field("num_rows", &PackCall::num_rows), Field("row_bytes", &PackCall::row_bytes),
        Field("index", &PackCall::index), Field("num_source_rows", &PackCall::num_source_rows),
        Field("sources", &PackCall::sources), Field("row_strides", &PackCall::row_strides),
        Field("begins", &PackCall::begins), Field("ends", &PackCall::ends),
        Field("launch", &PackCall::launch));
}

}  // namespace
}  // namespace splitkv

PYBIND11_MODULE(_kernels, m) {
    m.doc() =
        "Attention kernels of megatron_splitkv: partial forward, backward, joining of partials";
    splitkv::bind_structs(m);
    splitkv::bind_attention(m);
    splitkv::bind_partials(m);
    splitkv::bind_cuda(m);
    m.def("cpu_isas", &splitkv::cpu::isa_names,
          "Instruction sets this machine can run, best first, parted by spaces");
    m.def("current_cpu_isa", &splitkv::cpu::current_isa_name, "The instruction set in use");
    m.def("force_cpu_isa", &splitkv::cpu::force_isa, pybind11::arg("name"),
          "For debugging and tests: use this instruction set; 'auto' restores the best one");
}
