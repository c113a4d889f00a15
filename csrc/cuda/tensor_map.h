// Tensor maps: how TMA finds the tiles of a [rows, heads, dim] tensor.
#pragma once

#include <cuda.h>

#include "attention/params.h"

namespace splitkv::cuda {

// Shape of one TMA copy: a box of rows x heads x 128 bytes of columns, 64 of a 16-bit format and 32
// of fp32, that lies in shared memory as [rows][heads][128 bytes] with the 128-byte swizzle. Or
// half as many columns, with that of 64 bytes.
struct TensorMapBox {
    int32_t rows;
    int32_t heads;
    int32_t column_bytes = 128;  // or 64; also the width of the swizzle
};

// The map of a tensor; coordinates are {column, head, row}. Rows past the end load as zeros.
// An empty tensor gives an empty map, which must not be used.
// Throws std::invalid_argument when the address or a stride is not a multiple of 16 bytes.
CUtensorMap make_tensor_map(const char* name, const Rows& tensor, const TensorMapBox& box);

}  // namespace splitkv::cuda
