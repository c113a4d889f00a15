#include "attention/tensors.h"

#include <pybind11/gil_safe_call_once.h>

#include <array>
#include <string>
#include <utility>

#include "common/check.h"

namespace splitkv {
namespace {

namespace py = pybind11;

// Made once and never freed: they outlive the interpreter's last call.
PyObject* interned(const char* name) { return PyUnicode_InternFromString(name); }

py::object attribute(py::handle object, PyObject* name) {
    PyObject* value = PyObject_GetAttr(object.ptr(), name);
    if (value == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
}

py::object call(py::handle object, PyObject* method) {
    PyObject* value = PyObject_CallMethodNoArgs(object.ptr(), method);
    if (value == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
}

DType dtype_of(py::handle torch_dtype) {
    using Known = std::array<std::pair<PyObject*, DType>, 3>;
    // Not a plain static: its guard and the GIL might wait for each other.
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Known> storage;
    const auto make = [] {
        const py::module_ torch = py::module_::import("torch");
        const auto of = [&](const char* name) { return py::object(torch.attr(name)).release(); };
        return Known{{{of("float32").ptr(), DType::kFloat32},
                      {of("bfloat16").ptr(), DType::kBFloat16},
                      {of("float16").ptr(), DType::kFloat16}}};
    };
    for (const auto& [object, dtype] : storage.call_once_and_store_result(make).get_stored()) {
        if (torch_dtype.ptr() == object) return dtype;
    }
    throw_invalid("a tensor has dtype ", py::str(torch_dtype).cast<std::string>(),
                  ", needs float32, bfloat16 or float16");
}

int64_t int_at(const py::tuple& tuple, size_t index) {
    const int64_t value = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), index));
    if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return value;
}

}  // namespace

Rows rows_at(uintptr_t address, DType dtype, const py::tuple& shape, const py::tuple& strides) {
    const size_t num_dims = shape.size();
    SPLITKV_CHECK((num_dims == 2 || num_dims == 3) && strides.size() == num_dims, "a tensor has ",
                  num_dims, " sizes and ", strides.size(), " strides, needs 2 or 3 of both");
    Rows rows{};
    rows.data = reinterpret_cast<void*>(address);
    rows.dtype = dtype;
    rows.rows = int_at(shape, 0);
    rows.heads = int_at(shape, 1);
    rows.dim = num_dims == 3 ? int_at(shape, 2) : 1;
    rows.row_stride = int_at(strides, 0);
    rows.head_stride = int_at(strides, 1);
    return rows;
}

Rows rows_of(py::handle tensor) {
    if (py::isinstance<Rows>(tensor)) return tensor.cast<Rows>();
    static PyObject* const data_ptr = interned("data_ptr");
    static PyObject* const dtype = interned("dtype");
    static PyObject* const shape = interned("shape");
    static PyObject* const stride = interned("stride");
    return rows_at(call(tensor, data_ptr).cast<uintptr_t>(), dtype_of(attribute(tensor, dtype)),
                   attribute(tensor, shape).cast<py::tuple>(),
                   call(tensor, stride).cast<py::tuple>());
}

}  // namespace splitkv
