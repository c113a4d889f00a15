// Size checks that the CPU and CUDA entry points share. Each throws std::invalid_argument with the
// values.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "common/check.h"

namespace splitkv {

inline constexpr int64_t kMaxHeadDim = 512;

inline void check_shape(const char* name, const Rows& tensor, int64_t rows, int64_t heads,
                        int64_t dim) {
    SPLITKV_CHECK(tensor.rows == rows && tensor.heads == heads && tensor.dim == dim, name,
                  " has shape [", tensor.rows, ", ", tensor.heads, ", ", tensor.dim, "], needs [",
                  rows, ", ", heads, ", ", dim, "]");
}

inline void check_float32(const char* name, const Rows& tensor) {
    SPLITKV_CHECK(tensor.dtype == DType::kFloat32, name, " must be float32");
}

inline void check_inputs(const Rows& q, const Rows& k, const Rows& v) {
    SPLITKV_CHECK(q.dim >= 1 && q.dim <= kMaxHeadDim, "q has head_dim ", q.dim, ", needs 1 to ",
                  kMaxHeadDim);
    SPLITKV_CHECK(v.dim >= 1 && v.dim <= kMaxHeadDim, "v has head_dim ", v.dim, ", needs 1 to ",
                  kMaxHeadDim);
    SPLITKV_CHECK(k.heads >= 1 && q.heads % k.heads == 0, "q has ", q.heads,
                  " heads, needs a multiple of the ", k.heads, " heads of k");
    check_shape("k", k, k.rows, k.heads, q.dim);
    check_shape("v", v, k.rows, k.heads, v.dim);
    SPLITKV_CHECK(k.dtype == q.dtype && v.dtype == q.dtype, "q, k and v differ in dtype");
}

}  // namespace splitkv
