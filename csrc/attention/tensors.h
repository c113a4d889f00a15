// A tensor of torch as Rows, read through Python: nothing here is compiled against torch.
#pragma once

#include <pybind11/pybind11.h>

#include "attention/params.h"

namespace splitkv {

// Rows at an address, of 2 or 3 sizes and strides; two are [rows, heads], with dim 1.
Rows rows_at(uintptr_t address, DType dtype, const pybind11::tuple& shape,
             const pybind11::tuple& strides);

// The same of a torch.Tensor, or a copy of Rows. Needs the GIL.
Rows rows_of(pybind11::handle tensor);

}  // namespace splitkv
