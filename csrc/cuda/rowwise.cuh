// What the one-pass kernels (merge, add, encode, row_dot) share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "attention/params.h"

namespace splitkv::cuda {

inline constexpr int kWarpThreads = 32;
inline constexpr int kWarpsPerCta = 8;  // 256 threads: 8 CTAs fill an SM at 32 registers
inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr int kVectorBytes = 16;  // the widest load of a thread

// Partials that a thread loads before it uses the first. Fewer let more threads fit an SM: 4, not
// 8, makes a merge of 8 partials 6 to 14 % faster, and 2, not 8, one of a single partial 40 %.
inline constexpr int kManyInFlight = 4;
inline constexpr int kFewInFlight = 2;

inline bool has_few_parts(int64_t num_parts, int64_t num_rows) {
    return num_parts <= kFewInFlight * num_rows;
}

template <int kVector>
struct Values {
    float x[kVector];
};

__device__ __forceinline__ uint32_t global_warp() {
    return blockIdx.x * kWarpsPerCta + threadIdx.x / kWarpThreads;
}

__device__ __forceinline__ int lane() { return threadIdx.x % kWarpThreads; }

template <typename Element>
__device__ __forceinline__ const Element* row_of(const Rows& tensor, int64_t row, int64_t head) {
    return static_cast<const Element*>(tensor.data) + row * tensor.row_stride +
           head * tensor.head_stride;
}

template <typename Element>
__device__ __forceinline__ Element* mutable_row_of(const Rows& tensor, int64_t row, int64_t head) {
    return static_cast<Element*>(tensor.data) + row * tensor.row_stride + head * tensor.head_stride;
}

// Factors of partials. Where they travel unscaled it is one 1 for all, so that a thread's loads
// have no branch between them.
struct Scales {
    const float* data;
    int64_t row_stride;
    int64_t head_stride;

    __device__ __forceinline__ explicit Scales(const Rows& scale)
        : data(static_cast<const float*>(scale.data)),
          row_stride(scale.row_stride),
          head_stride(scale.head_stride) {
        static __device__ const float one = 1.0f;
        if (data == nullptr) {
            data = &one;
            row_stride = head_stride = 0;
        }
    }
    __device__ __forceinline__ float of(int64_t row, int64_t head) const {
        return data[row * row_stride + head * head_stride];
    }
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <typename Element>
__device__ __forceinline__ Element from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
    return __float2half_rn(x);
}

// Elements that load and store as one machine word of their total size.
template <typename Element, int kVector>
struct alignas(sizeof(Element) * kVector) Packed {
    Element x[kVector];
};

template <typename Element, int kVector>
__device__ __forceinline__ Packed<Element, kVector> load_packed(const Element* source) {
    return *reinterpret_cast<const Packed<Element, kVector>*>(source);
}

template <typename Element, int kVector>
__device__ __forceinline__ Values<kVector> unpack(const Packed<Element, kVector>& packed) {
    Values<kVector> values;
    if constexpr (std::is_same_v<Element, __nv_bfloat16> && kVector % 2 == 0) {
        // bf16 is the upper half of fp32: whole words, or ptxas takes the values apart one by one.
        const auto* words = reinterpret_cast<const uint32_t*>(&packed);
#pragma unroll
        for (int i = 0; i < kVector / 2; ++i) {
            values.x[2 * i] = __uint_as_float(words[i] << 16);
            values.x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) values.x[i] = to_float(packed.x[i]);
    }
    return values;
}

template <typename Element, int kVector>
__device__ __forceinline__ Values<kVector> load_values(const Element* source) {
    return unpack<Element, kVector>(load_packed<Element, kVector>(source));
}

template <typename Element, int kVector>
__device__ __forceinline__ void store_values(const Values<kVector>& values, Element* target) {
    Packed<Element, kVector> packed;
#pragma unroll
    for (int i = 0; i < kVector; ++i) packed.x[i] = from_float<Element>(values.x[i]);
    *reinterpret_cast<Packed<Element, kVector>*>(target) = packed;
}

// Values of one head from a column on, in the dtype of the tensor.
template <int kVector>
__device__ __forceinline__ void store_values_as(const Values<kVector>& values, const Rows& tensor,
                                                int64_t row, int64_t head, int column) {
    switch (tensor.dtype) {
        case DType::kFloat32:
            return store_values<float, kVector>(values,
                                                mutable_row_of<float>(tensor, row, head) + column);
        case DType::kBFloat16:
            return store_values<__nv_bfloat16, kVector>(
                values, mutable_row_of<__nv_bfloat16>(tensor, row, head) + column);
        case DType::kFloat16:
            return store_values<__half, kVector>(
                values, mutable_row_of<__half>(tensor, row, head) + column);
    }
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = kWarpThreads / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
    return x;
}

// Whether every row of the tensor can be read `vector` elements at a time.
inline bool is_wide(const Rows& tensor, int vector) {
    const int64_t bytes = tensor.dtype == DType::kFloat32 ? 4 : 2;
    return tensor.dim % vector == 0 && tensor.row_stride % vector == 0 &&
           tensor.head_stride % vector == 0 &&
           reinterpret_cast<int64_t>(tensor.data) % (vector * bytes) == 0;
}

}  // namespace splitkv::cuda
