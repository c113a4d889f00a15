// From head dims and tile kind to an instantiation of the forward kernel: 6 for each dtype.
#pragma once

#include "cuda/sm90/partial_fwd.cuh"

namespace splitkv::sm90 {

template <typename Element>
void launch_forward_of(const ForwardParams& params, const cuda::ForwardItem* items,
                       const cuda::ForwardWorkShape& shape, const ForwardWorkspace& workspace) {
    const auto is_dims = [&](int64_t qk, int64_t v) {
        return params.q.dim == qk && params.v.dim == v;
    };
    const auto kind = static_cast<TileKind>(shape.kind);
    if (is_dims(64, 64)) {
        launch_forward_kernel<ForwardTraits<Element, 64, 64, TileKind::kEdge>>(params, items, shape,
                                                                               workspace);
    } else if (is_dims(128, 128) && kind == TileKind::kEdge) {
        launch_forward_kernel<ForwardTraits<Element, 128, 128, TileKind::kEdge>>(params, items,
                                                                                 shape, workspace);
    } else if (is_dims(128, 128) && kind == TileKind::kInterior) {
        launch_forward_kernel<ForwardTraits<Element, 128, 128, TileKind::kInterior>>(
            params, items, shape, workspace);
    } else if (is_dims(128, 128)) {
        launch_forward_kernel<ForwardTraits<Element, 128, 128, TileKind::kShort>>(params, items,
                                                                                  shape, workspace);
    } else if (is_dims(192, 128)) {
        launch_forward_kernel<ForwardTraits<Element, 192, 128, TileKind::kEdge>>(params, items,
                                                                                 shape, workspace);
    } else {
        launch_forward_kernel<ForwardTraits<Element, 256, 256, TileKind::kEdge>>(params, items,
                                                                                 shape, workspace);
    }
}

}  // namespace splitkv::sm90
