// Vectors of kLanes floats, exp2, and conversions between fp32 and the 16-bit types.
// Included once by each isa_*.cpp, which sets SPLITKV_ISA (a namespace) and SPLITKV_LANES.
// Everything here is static or lives in that namespace, and nothing calls an inline function of
// the standard library: no code compiled for one instruction set may be shared with another.
#pragma once

#include <cstdint>

#include "cpu/isa.h"

#define SPLITKV_INLINE static inline __attribute__((always_inline))

namespace splitkv::cpu::SPLITKV_ISA {

constexpr int kLanes = SPLITKV_LANES;
static_assert(kRowTile % kLanes == 0, "a row tile is a whole number of vectors");
static_assert(kDimPadding % kLanes == 0, "padded rows are a whole number of vectors");

typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t))));

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

SPLITKV_INLINE Floats load(const float* source) {
    Floats value;
    __builtin_memcpy(&value, source, sizeof(value));
    return value;
}

SPLITKV_INLINE Ints load(const int32_t* source) {
    Ints value;
    __builtin_memcpy(&value, source, sizeof(value));
    return value;
}

SPLITKV_INLINE void store(float* target, Floats value) {
    __builtin_memcpy(target, &value, sizeof(value));
}

SPLITKV_INLINE Floats broadcast(float value) { return value - Floats{}; }

SPLITKV_INLINE Ints broadcast(int32_t value) { return value - Ints{}; }

SPLITKV_INLINE Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

// The one guard against -inf - (-inf): a row that has seen no key yet has maximum -inf, and is
// shifted by 0 instead, so that exp2(-inf - 0) = 0.
SPLITKV_INLINE Floats finite_shift(Floats row_max) {
    return row_max == broadcast(-kInfinity) ? Floats{} : row_max;
}

// 2^x with a relative error below 2e-7. Below 2^-126 the result is 0, above 2^128 it is +inf, NaN
// stays NaN. x = n + f with n integer and |f| <= 1/2; 2^f is the degree-6 polynomial of least
// relative error on that interval (1.9e-9), found by iteratively reweighted least squares.
SPLITKV_INLINE Floats exp2(Floats x) {
    constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Floats low = broadcast(-126.0f);
    const Floats high = broadcast(128.0f);
    const Floats clamped = x < low ? low : (x >= high ? high - 1.0f : x);
    const Floats shifted = clamped + kRoundMagic;
    const Floats f = clamped - (shifted - kRoundMagic);
    Floats y = f * 1.534581206e-4f + 1.339993136e-3f;
    y = y * f + 9.618488958e-3f;
    y = y * f + 5.550328777e-2f;
    y = y * f + 2.402264689e-1f;
    y = y * f + 6.931472057e-1f;
    y = y * f + 1.0f;
    // The integer part sits in the low bits of shifted; the shift drops the magic number's bits.
    const Ints power = (reinterpret_cast<Ints>(shifted) << 23) + 0x3f800000;
    y = y * reinterpret_cast<Floats>(power);
    y = x < low ? Floats{} : y;
    return x >= high ? broadcast(kInfinity) : y;
}

// The loops below are plain scalar code that the compiler vectorizes.

SPLITKV_INLINE float float_from_bits(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
}

SPLITKV_INLINE uint32_t bits_from_float(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    return bits;
}

SPLITKV_INLINE float float_from_bfloat16(uint16_t value) {
    return float_from_bits(static_cast<uint32_t>(value) << 16);
}

SPLITKV_INLINE float float_from_float16(uint16_t value) {
    const uint32_t magnitude = value & 0x7fffu;
    // The exponent bias differs by 112; the product is exact, also for subnormal halves.
    const float scaled = float_from_bits(magnitude << 13) * 0x1p112f;
    const uint32_t infinity_or_nan = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
    const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
    return float_from_bits(bits_from_float(scaled) | infinity_or_nan | sign);
}

// Round to nearest, ties to even.
SPLITKV_INLINE uint16_t bfloat16_from_float(float value) {
    const uint32_t bits = bits_from_float(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// Round to nearest, ties to even; 65520 and above give infinity.
SPLITKV_INLINE uint16_t float16_from_float(float value) {
    const uint32_t bits = bits_from_float(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    // Adding 0.5 rounds at 2^-24, the unit of a subnormal half.
    const uint32_t subnormal = bits_from_float(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;
    result = magnitude > 0x7f800000u ? 0x7e00u : result;
    return static_cast<uint16_t>(result | sign);
}

SPLITKV_INLINE int64_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// First element of tensor[row, head].
SPLITKV_INLINE char* row_pointer(const Rows& tensor, int64_t row, int64_t head) {
    return static_cast<char*>(tensor.data) +
           (row * tensor.row_stride + head * tensor.head_stride) * element_bytes(tensor.dtype);
}

SPLITKV_INLINE float* float_pointer(const Rows& tensor, int64_t row, int64_t head) {
    return reinterpret_cast<float*>(row_pointer(tensor, row, head));
}

// target[0 .. n) = source as fp32.
static inline void load_row(const void* source, DType dtype, int64_t n, float* target) {
    if (dtype == DType::kFloat32) {
        __builtin_memcpy(target, source, static_cast<size_t>(n) * sizeof(float));
        return;
    }
    const uint16_t* halves = static_cast<const uint16_t*>(source);
    if (dtype == DType::kBFloat16) {
        for (int64_t i = 0; i < n; ++i) target[i] = float_from_bfloat16(halves[i]);
    } else {
        for (int64_t i = 0; i < n; ++i) target[i] = float_from_float16(halves[i]);
    }
}

// target[0 .. n) in dtype = source.
static inline void store_row(const float* source, int64_t n, DType dtype, void* target) {
    if (dtype == DType::kFloat32) {
        __builtin_memcpy(target, source, static_cast<size_t>(n) * sizeof(float));
        return;
    }
    uint16_t* halves = static_cast<uint16_t*>(target);
    if (dtype == DType::kBFloat16) {
        for (int64_t i = 0; i < n; ++i) halves[i] = bfloat16_from_float(source[i]);
    } else {
        for (int64_t i = 0; i < n; ++i) halves[i] = float16_from_float(source[i]);
    }
}

}  // namespace splitkv::cpu::SPLITKV_ISA
