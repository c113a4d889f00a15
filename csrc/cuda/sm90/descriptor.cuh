// Shared-memory matrix descriptors of wgmma for tiles with the 128-byte swizzle.
//
// A tile [rows, columns] of 16-bit values lies in shared memory as chunks of 64 columns, each
// [rows][64] with 128-byte rows, as TMA writes it (tensor_map.h). Chunks start at multiples of
// 1024 bytes. A descriptor is two words: the high one is the same for every tile, so only the low
// one is computed, kept in a uniform register and stepped along by adding constants.
#pragma once

#include <cstdint>

#include "cuda/sm90/ptx.cuh"

namespace splitkv::sm90 {

inline constexpr int kChunkColumns = 64;
inline constexpr int kRowBytes = 128;                // one row of a chunk
inline constexpr int kSwizzleBytes = 8 * kRowBytes;  // the pattern repeats every 8 rows
inline constexpr int kStepK = 16;                    // K of one wgmma

// Bytes >> 4, the unit of all descriptor fields.
__host__ __device__ constexpr uint32_t descriptor_units(uint32_t bytes) { return bytes >> 4; }

// Stride of 1024 bytes between groups of 8 rows (bits 32 to 45), 128-byte swizzle (bits 62, 63).
inline constexpr uint32_t kDescriptorHigh = 0x40000000u | descriptor_units(kSwizzleBytes);

// Low word of an operand whose K runs along a chunk's columns (Q, K; also B of ds . k^T forms).
SPLITKV_DEVICE uint32_t k_major_low(uint32_t address) { return descriptor_units(address); }

// Low word of an operand whose K runs along rows, M or N along columns (V in p . v): the leading
// offset is the distance between chunks of `chunk_rows` rows.
SPLITKV_DEVICE uint32_t mn_major_low(uint32_t address, int chunk_rows) {
    return descriptor_units(address) | (descriptor_units(chunk_rows * kRowBytes) << 16);
}

SPLITKV_DEVICE uint64_t descriptor(uint32_t low) {
    return (static_cast<uint64_t>(kDescriptorHigh) << 32) | low;
}

// What to add to the low word of a K-major operand for its k-th step of 16 columns.
__host__ __device__ constexpr uint32_t k_major_step(int k, int chunk_rows) {
    constexpr int kStepsPerChunk = kChunkColumns / kStepK;
    return descriptor_units((k / kStepsPerChunk) * chunk_rows * kRowBytes +
                            (k % kStepsPerChunk) * kStepK * 2);
}

// What to add to the low word of an MN-major operand for its k-th step of 16 rows.
__host__ __device__ constexpr uint32_t mn_major_step(int k) {
    return descriptor_units(k * kStepK * kRowBytes);
}

// The value of one lane in every lane, which ptxas then knows to be uniform over the warp. With
// descriptors in vector registers the forward loses 3 to 13 % (rebuilt between the wgmmas).
SPLITKV_DEVICE int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
SPLITKV_DEVICE uint32_t uniform(uint32_t value) { return __shfl_sync(0xffffffffu, value, 0); }

}  // namespace splitkv::sm90
