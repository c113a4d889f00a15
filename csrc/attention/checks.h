// Checks of sizes and dtypes that hold on every device. Each throws std::invalid_argument with the
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

// The factors of partials [parts.rows, parts.heads, *], where there are any.
inline void check_scale(const Rows& scale, const Rows& parts) {
    if (scale.data == nullptr) return;
    check_shape("part_scale", scale, parts.rows, parts.heads, 1);
    check_float32("part_scale", scale);
}

// What is added to is fp32. On CUDA what is only written may have any dtype.
inline void check_total(const char* name, const Rows& total, bool accumulates,
                        const Launch& launch) {
    if (accumulates || launch.device != Device::kCuda) check_float32(name, total);
}

inline void check_merge(const MergeParams& params) {
    const Rows& out = params.out;
    check_shape("lse", params.lse, out.rows, out.heads, 1);
    check_shape("part_out", params.part_out, params.part_out.rows, out.heads, out.dim);
    check_shape("part_lse", params.part_lse, params.part_out.rows, out.heads, 1);
    check_total("out", out, params.accumulates, params.launch);
    check_float32("lse", params.lse);
    check_float32("part_lse", params.part_lse);
    check_scale(params.part_scale, params.part_out);
}

inline void check_add(const AddParams& params) {
    const Rows& total = params.total;
    check_shape("parts", params.parts, params.parts.rows, total.heads, total.dim);
    check_total("total", total, params.accumulates, params.launch);
    check_scale(params.part_scale, params.parts);
}

inline void check_encode(const EncodeParams& params) {
    const Rows& values = params.values;
    const int64_t num_rows = params.index == nullptr ? values.rows : params.encoded.rows;
    check_shape("encoded", params.encoded, num_rows, values.heads, values.dim);
    check_shape("scale", params.scale, num_rows, values.heads, 1);
    check_float32("values", values);
    check_float32("scale", params.scale);
    if (params.lse.data != nullptr) {
        check_shape("lse", params.lse, values.rows, values.heads, 1);
        check_shape("sent_lse", params.sent_lse, num_rows, values.heads, 1);
        check_float32("lse", params.lse);
        check_float32("sent_lse", params.sent_lse);
    }
    SPLITKV_CHECK(params.encoded.dtype == DType::kFloat16, "encoded must be float16");
    SPLITKV_CHECK(values.dim >= 1 && values.dim <= kMaxHeadDim, "values has head_dim ", values.dim,
                  ", needs 1 to ", kMaxHeadDim);
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

inline void check_forward(const ForwardParams& params) {
    const Rows& q = params.q;
    check_inputs(q, params.k, params.v);
    check_shape("out", params.out, q.rows, q.heads, params.v.dim);
    check_shape("lse", params.lse, q.rows, q.heads, 1);
    check_float32("lse", params.lse);
}

// Gradients of the keys. Sums of several calls are fp32; one call may round its own.
inline void check_key_gradient(const char* name, const Rows& gradient,
                               const BackwardParams& params) {
    SPLITKV_CHECK(gradient.dtype == DType::kFloat32 ||
                      (!params.accumulates && gradient.dtype == params.q.dtype),
                  name, " must be float32, or of the dtype of q where it is overwritten");
    SPLITKV_CHECK(gradient.dtype == params.dk.dtype, "dk and dv differ in dtype");
}

inline void check_backward(const BackwardParams& params) {
    const Rows& q = params.q;
    check_inputs(q, params.k, params.v);
    check_shape("dout", params.dout, q.rows, q.heads, params.v.dim);
    check_shape("lse", params.lse, q.rows, q.heads, 1);
    check_shape("delta", params.delta, q.rows, q.heads, 1);
    check_shape("dq", params.dq, q.rows, q.heads, q.dim);
    check_shape("dk", params.dk, params.k.rows, params.k.heads, q.dim);
    check_shape("dv", params.dv, params.k.rows, params.k.heads, params.v.dim);
    check_float32("lse", params.lse);
    check_float32("delta", params.delta);
    check_float32("dq", params.dq);
    check_key_gradient("dk", params.dk, params);
    check_key_gradient("dv", params.dv, params);
}

}  // namespace splitkv
