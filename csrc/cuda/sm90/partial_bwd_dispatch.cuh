// From head dims to an instantiation of the backward kernel: 4 for each dtype.
#pragma once

#include "cuda/sm90/partial_bwd.cuh"

namespace splitkv::sm90 {

template <typename Element>
void launch_backward_of(const BackwardParams& params, const BackwardWorkArrays& work,
                        const cuda::BackwardWorkShape& shape, const BackwardWorkspace& workspace) {
    if (params.q.dim == 64) {
        launch_backward_kernel<BackwardTraits<Element, 64, 64>>(params, work, shape, workspace);
    } else if (params.q.dim == 128) {
        launch_backward_kernel<BackwardTraits<Element, 128, 128>>(params, work, shape, workspace);
    } else if (params.q.dim == 192) {
        launch_backward_kernel<BackwardWideTraits<Element, 192, 128>>(params, work, shape,
                                                                      workspace);
    } else {
        launch_backward_kernel<BackwardWideTraits<Element, 256, 256>>(params, work, shape,
                                                                      workspace);
    }
}

}  // namespace splitkv::sm90
