#include "cuda/sm80/partial_fwd.cuh"

namespace splitkv::sm80 {

template void launch_forward_of<__nv_bfloat16>(const ForwardParams&, const cuda::ForwardItem*,
                                               const cuda::ForwardWorkShape&, const ForwardParts&);

}  // namespace splitkv::sm80
