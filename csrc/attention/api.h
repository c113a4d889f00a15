// Entry points of the attention ops: check sizes, then hand the params to the backend of the
// device that launch names.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/params.h"

namespace splitkv {

// What the scratch memory of forward and backward depends on.
struct WorkspaceRequest {
    Device device;
    int64_t head_dim_qk;
    int64_t head_dim_v;
    int32_t num_threads;              // of the CPU; unused on CUDA
    DType gradient_dtype;             // of dk and dv; unused by the forward
    std::vector<int64_t> work_shape;  // as in ForwardCall
};

// A forward and the work list that it runs on.
struct ForwardCall : ForwardParams {
    const int32_t* work;              // device copy of a cuda::ForwardWork; nullptr on the CPU
    std::vector<int64_t> work_shape;  // its shape; empty on the CPU
};

struct BackwardCall : BackwardParams {
    const int32_t* work;              // device copy of a cuda::BackwardWork; nullptr on the CPU
    std::vector<int64_t> work_shape;  // its shape; empty on the CPU
};

// The fields of PackParams as lists, one entry a field.
struct PackCall {
    char* packed;
    int64_t num_rows;
    int64_t row_bytes;
    const int64_t* index;              // nullptr takes all rows
    int64_t num_source_rows;           // of each source
    std::vector<uintptr_t> sources;    // addresses
    std::vector<int64_t> row_strides;  // bytes
    std::vector<int64_t> begins;
    std::vector<int64_t> ends;
    Launch launch;
};

// All of them throw std::invalid_argument, with the values, when the params contradict each other.
// On CUDA they return once the kernels are queued.
int64_t forward_workspace_bytes(const WorkspaceRequest& request);
int64_t backward_workspace_bytes(const WorkspaceRequest& request);
void forward(const ForwardCall& call);
void backward(const BackwardCall& call);
void merge(const MergeParams& params);
void add(const AddParams& params);
void encode(const EncodeParams& params);
void pack(const PackCall& call);

}  // namespace splitkv
