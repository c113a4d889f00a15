// Sums of split KV tiles, from fp32 to the dtype of the inputs.
#pragma once

#include <cstdint>

#include "attention/params.h"

namespace splitkv::cuda {

// For each i, rounds rows [i * tile_rows, + tile_rows) of all heads of `sums`, fp32, to rows
// [tiles[i] * tile_rows, + tile_rows) of `rounded`, bf16 or fp16, as far as there are; `tiles` is a
// list on the device. Addresses and strides are multiples of 16 bytes.
void round_tiles(const Rows& sums, const Rows& rounded, const int32_t* tiles, int64_t num_tiles,
                 int64_t tile_rows, void* stream);

}  // namespace splitkv::cuda
