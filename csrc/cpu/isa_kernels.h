// The kernel table of one instruction set. Included last by each isa_*.cpp.
#pragma once

#include "cpu/backward_tile.h"
#include "cpu/forward_tile.h"

namespace splitkv::cpu::SPLITKV_ISA {

template <typename Element, typename Convert>
SPLITKV_INLINE void scale_into(const Element* source, Convert convert, int64_t n, float weight,
                               bool is_first, float* target) {
    if (is_first) {
        for (int64_t i = 0; i < n; ++i) target[i] = weight * convert(source[i]);
    } else {
        for (int64_t i = 0; i < n; ++i) target[i] += weight * convert(source[i]);
    }
}

static void merge_row(const void* source, DType dtype, int64_t n, float weight, bool is_first,
                      float* target) {
    const uint16_t* halves = static_cast<const uint16_t*>(source);
    switch (dtype) {
        case DType::kFloat32:
            return scale_into(
                static_cast<const float*>(source), [](float x) { return x; }, n, weight, is_first,
                target);
        case DType::kBFloat16:
            return scale_into(
                halves, [](uint16_t x) { return float_from_bfloat16(x); }, n, weight, is_first,
                target);
        case DType::kFloat16:
            return scale_into(
                halves, [](uint16_t x) { return float_from_float16(x); }, n, weight, is_first,
                target);
    }
}

static float encode_row(const float* source, int64_t n, uint16_t* target) {
    // Magnitudes are ordered like their bits, with NaN above infinity: one NaN makes the row NaN.
    uint32_t bits = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t magnitude = bits_from_float(source[i]) & 0x7fffffffu;
        bits = magnitude > bits ? magnitude : bits;
    }
    const float scale = float_from_bits(bits);
    const float divisor = bits == 0 ? 1.0f : scale;
    for (int64_t i = 0; i < n; ++i) target[i] = float16_from_float(source[i] / divisor);
    return scale;
}

const Isa kIsa = {SPLITKV_ISA_NAME, forward_tile, backward_tile, merge_row, encode_row};

}  // namespace splitkv::cpu::SPLITKV_ISA
