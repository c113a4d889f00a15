// The kernels in AVX512. Compiled with more than the baseline's flags; called only when the CPU has
// it.
#if !defined(__AVX512F__)
#error "compile this file with the AVX512 flags of CMakeLists.txt"
#endif
#define SPLITKV_ISA avx512
#define SPLITKV_ISA_NAME "avx512"
#define SPLITKV_LANES 16
#define SPLITKV_GEMM_VECTORS 4

#include "cpu/isa_kernels.h"
