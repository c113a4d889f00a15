// Stands in for the CUDA backend in a build without nvcc.
#include "common/check.h"
#include "cuda/backend.h"

namespace splitkv::cuda {
namespace {

[[noreturn]] void refuse() {
    throw_invalid("this build holds CPU kernels only; install again where nvcc is on the PATH");
}

}  // namespace

bool is_built() { return false; }

int64_t forward_workspace_bytes(const ForwardWorkShape&) { refuse(); }

void forward(const ForwardParams&, const int32_t*, const ForwardWorkShape&) { refuse(); }

int64_t backward_workspace_bytes(const BackwardWorkShape&, DType) { refuse(); }

void backward(const BackwardParams&, const int32_t*, const BackwardWorkShape&) { refuse(); }

void merge(const MergeParams&) { refuse(); }

void add(const AddParams&) { refuse(); }

void encode(const EncodeParams&) { refuse(); }

void pack(const PackParams&) { refuse(); }

void row_dot(const Rows&, const Rows&, const Rows&, const Launch&) { refuse(); }

}  // namespace splitkv::cuda
