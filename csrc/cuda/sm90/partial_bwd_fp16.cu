#include "cuda/sm90/partial_bwd_dispatch.cuh"

namespace splitkv::sm90 {

template void launch_backward_of<__half>(const BackwardParams&, const BackwardWorkArrays&,
                                         const cuda::BackwardWorkShape&, const BackwardWorkspace&);

}  // namespace splitkv::sm90
