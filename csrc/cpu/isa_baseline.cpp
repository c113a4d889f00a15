// The kernels in the baseline instruction set of the target: SSE2 on x86-64, NEON on aarch64.
#define SPLITKV_ISA baseline
#define SPLITKV_ISA_NAME "baseline"
#define SPLITKV_LANES 4
#if defined(__aarch64__)
#define SPLITKV_GEMM_VECTORS 4  // 32 vector registers
#else
#define SPLITKV_GEMM_VECTORS 2  // 16 vector registers
#endif

#include "cpu/isa_kernels.h"
