// The kernel table of one instruction set. Included last by each isa_*.cpp.
#pragma once

#include "cpu/backward_tile.h"
#include "cpu/forward_tile.h"

namespace splitkv::cpu::SPLITKV_ISA {

static void merge_row(const void* source, DType dtype, int64_t n, float weight, bool is_first,
                      float* target) {
    constexpr int64_t kChunk = 256;  // elements converted at a time, on the stack
    float chunk[kChunk];
    for (int64_t start = 0; start < n; start += kChunk) {
        const int64_t count = n - start < kChunk ? n - start : kChunk;
        load_row(static_cast<const char*>(source) + start * element_bytes(dtype), dtype, count,
                 chunk);
        float* part = target + start;
        if (is_first) {
            for (int64_t i = 0; i < count; ++i) part[i] = weight * chunk[i];
        } else {
            for (int64_t i = 0; i < count; ++i) part[i] += weight * chunk[i];
        }
    }
}

const Isa kIsa = {SPLITKV_ISA_NAME, forward_tile, backward_tile, merge_row};

}  // namespace splitkv::cpu::SPLITKV_ISA
