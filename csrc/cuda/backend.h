// The CUDA backend as the api sees it. Params arrive checked as far as all devices agree; each
// function refuses what CUDA alone cannot do, then launches on the given stream and returns: no
// synchronization, no allocation, capturable in a CUDA graph.
// Errors: std::invalid_argument with the values, before anything is launched.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "cuda/backward_work.h"
#include "cuda/forward_work.h"

namespace splitkv::cuda {

// False in a build without nvcc, where every function below throws.
bool is_built();

int64_t forward_workspace_bytes(const ForwardWorkShape& shape);

// `work` is the device copy of a ForwardWork: its items, then its merge rows.
void forward(const ForwardParams& params, const int32_t* work, const ForwardWorkShape& shape);

// More where dk and dv are rounded: the parts of a split KV tile join in fp32.
int64_t backward_workspace_bytes(const BackwardWorkShape& shape, DType gradient_dtype);

// `work` is the device copy of a BackwardWork: its items, row tiles, then segments. dq must be
// contiguous and dout have the dtype of q.
void backward(const BackwardParams& params, const int32_t* work, const BackwardWorkShape& shape);

void merge(const MergeParams& params);

void add(const AddParams& params);

void encode(const EncodeParams& params);

void pack(const PackParams& params);

// sums[row, head] = sum over dim of a * b, fp32: delta, from dout and the merged out. CUDA alone,
// so it checks all that it is given.
void row_dot(const Rows& a, const Rows& b, const Rows& sums, const Launch& launch);

}  // namespace splitkv::cuda
