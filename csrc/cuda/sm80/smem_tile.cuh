// Tiles of 16-bit values in shared memory: how they are laid out, loaded and multiplied.
//
// A tile is cut into chunks of 64 columns. In a chunk a row is 128 bytes, and its 16-byte unit u
// lies at place u ^ (row % 8): the 8 rows that one ldmatrix phase reads then hit all banks once.
#pragma once

#include <cstdint>

#include "cuda/sm80/ptx.cuh"
#include "cuda/sm80/tiles.h"

namespace splitkv::sm80 {

inline constexpr int kElementBytes = 2;
inline constexpr int kChunkColumns = 64;
inline constexpr int kChunkRowBytes = kChunkColumns * kElementBytes;
inline constexpr int kUnitBytes = 16;  // of one cp.async, and of one row of an ldmatrix
inline constexpr int kUnitColumns = kUnitBytes / kElementBytes;
inline constexpr int kUnitsPerChunkRow = kChunkRowBytes / kUnitBytes;
inline constexpr int kSwizzleRows = 8;
inline constexpr int kStepColumns = 16;  // K of one mma
inline constexpr int kStepsPerChunk = kChunkColumns / kStepColumns;

__host__ __device__ constexpr int tile_bytes(int rows, int columns) {
    return rows * columns * kElementBytes;
}

// ---- loading ----

// Consecutive rows of one head.
template <typename Element>
struct HeadRows {
    const Element* data;
    int64_t row_stride;
    int num_rows;

    SPLITKV_DEVICE bool contains(int row) const { return row < num_rows; }
    SPLITKV_DEVICE int64_t offset(int row) const { return row * row_stride; }
};

// Rows of a row tile: row m is query row m / heads_per_tile, head m % heads_per_tile.
template <typename Element>
struct PackedRows {
    const Element* data;  // of the first query row and head
    int64_t row_stride;
    int64_t head_stride;
    int num_rows;  // query rows
    int heads_per_tile;

    SPLITKV_DEVICE int row_of(int m) const { return heads_per_tile == 1 ? m : m / heads_per_tile; }
    SPLITKV_DEVICE bool contains(int m) const { return row_of(m) < num_rows; }
    SPLITKV_DEVICE int64_t offset(int m) const {
        const int row = row_of(m);
        return row * row_stride + (m - row * heads_per_tile) * head_stride;
    }
};

// Starts copying a tile, all threads of the CTA together; rows beyond the last become zeros.
template <int kRows, int kColumns, int kThreads, typename Source>
SPLITKV_DEVICE void load_tile(uint32_t tile, const Source& source) {
    constexpr int kThreadRows = kThreads / kUnitsPerChunkRow;
    constexpr int kRowsAtOnce = kThreadRows < kRows ? kThreadRows : kRows;
    constexpr int kChunksAtOnce = kThreadRows / kRowsAtOnce;
    constexpr int kChunks = kColumns / kChunkColumns;
    static_assert(kRows % kRowsAtOnce == 0 && kChunks % kChunksAtOnce == 0,
                  "every thread copies the same number of units");
    const int unit = static_cast<int>(threadIdx.x) % kUnitsPerChunkRow;
    const int thread_row = static_cast<int>(threadIdx.x) / kUnitsPerChunkRow;
    const int first_chunk = thread_row / kRowsAtOnce;
    const int first_row = thread_row % kRowsAtOnce;
    const uint32_t target = tile + first_chunk * kRows * kChunkRowBytes +
                            first_row * kChunkRowBytes +
                            (unit ^ (first_row % kSwizzleRows)) * kUnitBytes;
    const int column = first_chunk * kChunkColumns + unit * kUnitColumns;
#pragma unroll
    for (int row = 0; row < kRows; row += kRowsAtOnce) {
        static_assert(kRowsAtOnce % kSwizzleRows == 0, "a thread's rows share their swizzle");
        const bool is_read = source.contains(first_row + row);
        const auto* from = source.data + (is_read ? source.offset(first_row + row) : 0) + column;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; chunk += kChunksAtOnce) {
            ptx::cp_async_16(target + (chunk * kRows + row) * kChunkRowBytes,
                             from + chunk * kChunkColumns, is_read);
        }
    }
}

// ---- reading ----

// Where one lane points ldmatrix in a tile of kRows rows.
template <int kRows>
struct TileReader {
    uint32_t row_address;
    uint32_t unit_bytes;  // swizzled; each step of 16 columns flips higher bits of it

    SPLITKV_DEVICE TileReader(uint32_t tile, int row, int unit)
        : row_address(tile + row * kChunkRowBytes),
          unit_bytes((unit ^ (row % kSwizzleRows)) * kUnitBytes) {}
    // `row`: a multiple of 8; `step`: of 16 columns.
    SPLITKV_DEVICE uint32_t at(int row, int step) const {
        constexpr uint32_t kStepBytes = kStepColumns * kElementBytes;
        return row_address + (step / kStepsPerChunk * kRows + row) * kChunkRowBytes +
               (unit_bytes ^ (step % kStepsPerChunk * kStepBytes));
    }
};

SPLITKV_DEVICE int lane() { return static_cast<int>(threadIdx.x) % kWarpThreads; }

// For an A operand (16 rows, 16 columns), and transposed for two B operands whose K are the rows
// and whose N are 8 columns each.
template <int kRows>
SPLITKV_DEVICE TileReader<kRows> row_reader(uint32_t tile, int first_row = 0) {
    return TileReader<kRows>(tile, first_row + lane() % 16, lane() / 16);
}

// For two B operands whose K are the columns and whose N are 8 rows each.
template <int kRows>
SPLITKV_DEVICE TileReader<kRows> transposed_reader(uint32_t tile) {
    return TileReader<kRows>(tile, lane() / 16 * 8 + lane() % 8, lane() / 8 % 2);
}

// ---- multiplying ----

// Registers of a warp's accumulator of 16 rows.
__host__ __device__ constexpr int accumulator_registers(int columns) { return columns / 2; }

template <int kCount, int kRegisters>
SPLITKV_DEVICE void clear(float (&acc)[kCount][kRegisters]) {
#pragma unroll
    for (int m = 0; m < kCount; ++m) {
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) acc[m][i] = 0.0f;
    }
}

// acc += a . b^T over kDim columns: kCount times 16 rows of the tile of `a`, all rows of that of
// `b` (a row_reader and a transposed_reader).
template <typename Element, int kDim, int kCount, int kRegisters, int kRowsA, int kRowsB>
SPLITKV_DEVICE void multiply_rows(const TileReader<kRowsA>& a, const TileReader<kRowsB>& b,
                                  float (&acc)[kCount][kRegisters]) {
    static_assert(kRegisters == accumulator_registers(kRowsB), "one column for each row of b");
#pragma unroll
    for (int step = 0; step < kDim / kStepColumns; ++step) {
        uint32_t left[kCount][4];
#pragma unroll
        for (int m = 0; m < kCount; ++m) ptx::ldmatrix_x4(left[m], a.at(m * kMmaRows, step));
#pragma unroll
        for (int n = 0; n < kRowsB / 16; ++n) {
            uint32_t right[4];
            ptx::ldmatrix_x4(right, b.at(n * 16, step));
#pragma unroll
            for (int m = 0; m < kCount; ++m) {
                ptx::mma_m16n8k16<Element>(&acc[m][8 * n], left[m], right[0], right[1]);
                ptx::mma_m16n8k16<Element>(&acc[m][8 * n + 4], left[m], right[2], right[3]);
            }
        }
    }
}

// acc += a . b: kCount times 16 rows held in registers, over all rows of the tile of `b` (a
// row_reader).
template <typename Element, int kCount, int kSteps, int kRegisters, int kRowsB>
SPLITKV_DEVICE void multiply_columns(const uint32_t (&a)[kCount][kSteps][4],
                                     const TileReader<kRowsB>& b,
                                     float (&acc)[kCount][kRegisters]) {
    static_assert(kSteps * kStepColumns == kRowsB, "one column of a for each row of b");
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int n = 0; n < kRegisters / 8; ++n) {
            uint32_t right[4];
            ptx::ldmatrix_x4_trans(right, b.at(step * kStepColumns, n));
#pragma unroll
            for (int m = 0; m < kCount; ++m) {
                ptx::mma_m16n8k16<Element>(&acc[m][8 * n], a[m][step], right[0], right[1]);
                ptx::mma_m16n8k16<Element>(&acc[m][8 * n + 4], a[m][step], right[2], right[3]);
            }
        }
    }
}

// An accumulator is the A operand of the next product, once rounded to 16 bits.
template <typename Element, int kCount, int kRegisters>
SPLITKV_DEVICE void pack(const float (&acc)[kCount][kRegisters],
                         uint32_t (&packed)[kCount][kRegisters / 8][4]) {
#pragma unroll
    for (int m = 0; m < kCount; ++m) {
#pragma unroll
        for (int step = 0; step < kRegisters / 8; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                packed[m][step][i] =
                    ptx::cvt_rn_x2<Element>(acc[m][8 * step + 2 * i], acc[m][8 * step + 2 * i + 1]);
            }
        }
    }
}

}  // namespace splitkv::sm80
