// Entry points of the attention ops: check sizes, then hand the params to the backend of the
// device.
#pragma once

#include <cstdint>

#include "attention/params.h"

namespace splitkv {

// Scratch bytes for head dims (head_dim_qk, head_dim_v) with num_threads CPU threads.
int64_t forward_workspace_bytes(int64_t head_dim_qk, int64_t head_dim_v, int32_t num_threads);
int64_t backward_workspace_bytes(int64_t head_dim_qk, int64_t head_dim_v, int32_t num_threads);

// All of them throw std::invalid_argument, with the values, when the params contradict each other.
void forward(const ForwardParams& params);
void backward(const BackwardParams& params);
void merge(const MergeParams& params);
void add(const AddParams& params);
void encode(const EncodeParams& params);

}  // namespace splitkv
