// The one matrix product behind all five products of attention: C = A.B or C = C * scale + A.B.
// A is read one element at a time and broadcast, so it may lie in either order; B and C are read
// in vectors along their rows. Sizes are those of a tile; everything is in L1 and L2.
#pragma once

#include "cpu/simd.h"

namespace splitkv::cpu::SPLITKV_ISA {

// Accumulators: kGemmRows x kGemmVectors, plus kGemmVectors of B and one of A, must fit in the
// register file: 6 x 4 + 4 + 1 of 32 (AVX-512, NEON), 6 x 2 + 2 + 1 of 16 (AVX2, SSE2).
constexpr int kGemmRows = 6;
constexpr int kGemmVectors = SPLITKV_GEMM_VECTORS;

struct Gemm {
    const float* a;  // [m, k] when rows of A are contiguous along k, [k, m] for a transposed A
    int64_t lda;
    const float* b;  // [k, n]
    int64_t ldb;
    float* c;  // [m, n]
    int64_t ldc;
    int m;
    int n;  // a multiple of kLanes
    int k;
    const float* scale;  // [n]: C = C * scale + A.B; nullptr: C = A.B
};

template <bool kTransposedA, int kRows, int kVectors>
static void gemm_block(const Gemm& g, int row, int column) {
    const int64_t step_row = kTransposedA ? 1 : g.lda;
    const int64_t step_k = kTransposedA ? g.lda : 1;
    const float* a = g.a + row * step_row;
    const float* b = g.b + column;
    Floats acc[kRows][kVectors] = {};
    for (int k = 0; k < g.k; ++k, a += step_k, b += g.ldb) {
        Floats right[kVectors];
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; ++j) right[j] = load(b + j * kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
            const Floats left = broadcast(a[i * step_row]);
#pragma GCC unroll 8
            for (int j = 0; j < kVectors; ++j) acc[i][j] += left * right[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
        float* c = g.c + (row + i) * g.ldc + column;
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; ++j) {
            if (g.scale != nullptr) {
                acc[i][j] += load(c + j * kLanes) * load(g.scale + column + j * kLanes);
            }
            store(c + j * kLanes, acc[i][j]);
        }
    }
}

// All rows of one panel of columns. The last rows, fewer than kGemmRows, get a block of their size.
template <bool kTransposedA, int kVectors>
static void gemm_panel(const Gemm& g, int column) {
    int row = 0;
    for (; row + kGemmRows <= g.m; row += kGemmRows) {
        gemm_block<kTransposedA, kGemmRows, kVectors>(g, row, column);
    }
    switch (g.m - row) {
        case 1:
            return gemm_block<kTransposedA, 1, kVectors>(g, row, column);
        case 2:
            return gemm_block<kTransposedA, 2, kVectors>(g, row, column);
        case 3:
            return gemm_block<kTransposedA, 3, kVectors>(g, row, column);
        case 4:
            return gemm_block<kTransposedA, 4, kVectors>(g, row, column);
        case 5:
            return gemm_block<kTransposedA, 5, kVectors>(g, row, column);
        default:
            return;
    }
}

template <bool kTransposedA>
static void gemm(const Gemm& g) {
    constexpr int kPanel = kGemmVectors * kLanes;
    int column = 0;
    for (; column + kPanel <= g.n; column += kPanel) {
        gemm_panel<kTransposedA, kGemmVectors>(g, column);
    }
    for (; column < g.n; column += kLanes) gemm_panel<kTransposedA, 1>(g, column);
}

}  // namespace splitkv::cpu::SPLITKV_ISA
