// Sizes of a work list as a list of integers and back: how they pass through an op's int[]
// argument.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "common/check.h"

namespace splitkv {

template <typename Shape>
constexpr size_t num_ints() {
    static_assert(sizeof(Shape) % sizeof(int64_t) == 0, "a struct of int64 alone");
    return sizeof(Shape) / sizeof(int64_t);
}

template <typename Shape>
std::vector<int64_t> shape_to_ints(const Shape& shape) {
    std::vector<int64_t> ints(num_ints<Shape>());
    std::memcpy(ints.data(), &shape, sizeof(Shape));
    return ints;
}

template <typename Shape>
Shape shape_from_ints(const std::vector<int64_t>& ints) {
    Shape shape{};
    SPLITKV_CHECK(ints.size() == num_ints<Shape>(), "work_shape has ", ints.size(),
                  " numbers, needs ", num_ints<Shape>(), "; take it from WorkLists");
    std::memcpy(&shape, ints.data(), sizeof(Shape));
    return shape;
}

}  // namespace splitkv
