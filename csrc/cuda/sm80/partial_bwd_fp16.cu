#include "cuda/sm80/partial_bwd_dispatch.cuh"

namespace splitkv::sm80 {

template void launch_backward_of<__half>(const BackwardParams&, const BackwardWorkArrays&,
                                         const cuda::BackwardWorkShape&, const BackwardWorkspace&);

}  // namespace splitkv::sm80
