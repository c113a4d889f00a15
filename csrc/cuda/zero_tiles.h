// Zeros for the keys that no query row sees.
#pragma once

#include <cstdint>

#include "attention/params.h"

namespace splitkv::cuda {

// Clears rows [tile * tile_rows, + tile_rows), as far as there are, of all heads of a tensor,
// for each tile of a list on the device. Addresses and strides are multiples of 16 bytes.
void zero_tiles(const Rows& tensor, const int32_t* tiles, int64_t num_tiles, int64_t tile_rows,
                void* stream);

}  // namespace splitkv::cuda
