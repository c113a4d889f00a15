#include "cuda/sm90/partial_fwd_dispatch.cuh"

namespace splitkv::sm90 {

template void launch_forward_of<__nv_bfloat16>(const ForwardParams&, const cuda::ForwardItem*,
                                               const cuda::ForwardWorkShape&,
                                               const ForwardWorkspace&);

}  // namespace splitkv::sm90
