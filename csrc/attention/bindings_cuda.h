// The CUDA half of the bindings; present in every build, so that callers can ask what there is.
#pragma once

#include <pybind11/pybind11.h>

namespace splitkv {

void bind_cuda(pybind11::module_& m);

}  // namespace splitkv
