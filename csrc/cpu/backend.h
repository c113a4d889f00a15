// The CPU backend as the api sees it. Params arrive checked.
#pragma once

#include <cstdint>
#include <string>

#include "attention/params.h"

namespace splitkv::cpu {

int64_t forward_workspace_bytes(int64_t head_dim_qk, int64_t head_dim_v, int32_t num_threads);
int64_t backward_workspace_bytes(int64_t head_dim_qk, int64_t head_dim_v, int32_t num_threads);

void forward(const ForwardParams& params);
void backward(const BackwardParams& params);
void merge(const MergeParams& params);
void add(const AddParams& params);
void encode(const EncodeParams& params);
void pack(const PackParams& params);

// Names of the instruction sets that this machine runs, best first, parted by spaces.
std::string isa_names();

// Name of the instruction set in use.
std::string current_isa_name();

// Debugging: later calls use the named instruction set; "auto" restores the best one.
// Throws std::invalid_argument for a name outside isa_names().
void force_isa(const std::string& name);

}  // namespace splitkv::cpu
