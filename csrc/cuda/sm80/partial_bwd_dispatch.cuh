// From head dims to instantiations of the two backward kernels: 4 of each for each dtype.
#pragma once

#include "cuda/operand.h"
#include "cuda/sm80/dkv_kernel.cuh"
#include "cuda/sm80/dq_kernel.cuh"

namespace splitkv::sm80 {

template <typename Element, int kDimQk, int kDimV>
void launch_backward_kernels(const BackwardParams& params, const BackwardWorkArrays& work,
                             const cuda::BackwardWorkShape& shape,
                             const BackwardWorkspace& workspace) {
    if (shape.num_dq_items > 0) {
        launch_dq_kernel<DqTraits<Element, kDimQk, kDimV>>(params, work, shape, workspace);
    }
    if (shape.num_items > 0) {
        launch_dkv_kernel<DkvTraits<Element, kDimQk, kDimV>>(params, work, shape, workspace);
    }
}

template <typename Element>
void launch_backward_of(const BackwardParams& params, const BackwardWorkArrays& work,
                        const cuda::BackwardWorkShape& shape, const BackwardWorkspace& workspace) {
    cuda::check_operand("dout", params.dout);
    cuda::check_operand("q", params.q);
    cuda::check_operand("k", params.k);
    cuda::check_operand("v", params.v);
    cuda::check_operand("dk", params.dk);
    cuda::check_operand("dv", params.dv);
    switch (params.q.dim) {
        case 64:
            return launch_backward_kernels<Element, 64, 64>(params, work, shape, workspace);
        case 128:
            return launch_backward_kernels<Element, 128, 128>(params, work, shape, workspace);
        case 192:
            return launch_backward_kernels<Element, 192, 128>(params, work, shape, workspace);
        default:
            return launch_backward_kernels<Element, 256, 256>(params, work, shape, workspace);
    }
}

}  // namespace splitkv::sm80
