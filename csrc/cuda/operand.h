// What kernels ask of tensors that they read or write 16 bytes at a time. Host code.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "common/check.h"

namespace splitkv::cuda {

inline constexpr int64_t kAlignmentBytes = 16;

// Throws std::invalid_argument unless every row of every head starts at a multiple of 16 bytes.
inline void check_operand(const char* name, const Rows& tensor) {
    const int64_t element_bytes = tensor.dtype == DType::kFloat32 ? 4 : 2;
    if (tensor.rows == 0 || tensor.heads == 0) return;
    // Torch gives any stride to a dimension of size 1; it is multiplied by 0 alone.
    const int64_t head_bytes = tensor.heads == 1 ? 0 : tensor.head_stride * element_bytes;
    const int64_t row_bytes = tensor.rows == 1 ? 0 : tensor.row_stride * element_bytes;
    const int64_t address = reinterpret_cast<int64_t>(tensor.data);
    SPLITKV_CHECK(address % kAlignmentBytes == 0 && head_bytes % kAlignmentBytes == 0 &&
                      row_bytes % kAlignmentBytes == 0,
                  name, " has address ", address, " and strides of ", row_bytes, " and ",
                  head_bytes, " bytes, needs multiples of ", kAlignmentBytes, "; pass ", name,
                  ".contiguous()");
}

}  // namespace splitkv::cuda
