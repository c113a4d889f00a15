// The kernels in AVX2. Compiled with more than the baseline's flags; called only when the CPU has
// it.
#if !defined(__AVX2__)
#error "compile this file with the AVX2 flags of CMakeLists.txt"
#endif
#define SPLITKV_ISA avx2
#define SPLITKV_ISA_NAME "avx2"
#define SPLITKV_LANES 8
#define SPLITKV_GEMM_VECTORS 2

#include "cpu/isa_kernels.h"
