// Every PTX instruction of the sm_90a kernels, one function each, named after the instruction.
// Section numbers are those of the PTX ISA 9.0 manual.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#define SPLITKV_DEVICE __device__ __forceinline__

namespace splitkv::sm90::ptx {

SPLITKV_DEVICE uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier, 9.7.13.15 ----

SPLITKV_DEVICE void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

SPLITKV_DEVICE void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

SPLITKV_DEVICE void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

SPLITKV_DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Waits for the phase of the given parity to complete. The loop stays inside the asm: written in
// C++ it makes ptxas serialize the wgmmas around it (warning C7512).
SPLITKV_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n\t"
        ".reg .pred done;\n\t"
        "wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@!done bra wait;\n\t"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// ---- named barriers, 9.7.13.1 ----

SPLITKV_DEVICE void barrier_sync(int id, int num_threads) {
    asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

SPLITKV_DEVICE void barrier_arrive(int id, int num_threads) {
    asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// ---- bulk copies, 9.7.9.25 to 9.7.9.27 ----

// Loads the box at {column, head, row} of a rank-3 map to shared memory; completes on the barrier.
SPLITKV_DEVICE void cp_async_bulk_tensor_3d(uint32_t target, const CUtensorMap* map,
                                            uint32_t barrier, int column, int head, int row) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(target),
        "l"(map), "r"(column), "r"(head), "r"(row), "r"(barrier)
        : "memory");
}

// The same with a cache policy of createpolicy.
SPLITKV_DEVICE void cp_async_bulk_tensor_3d_hint(uint32_t target, const CUtensorMap* map,
                                                 uint32_t barrier, int column, int head, int row,
                                                 uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(target),
        "l"(map), "r"(column), "r"(head), "r"(row), "r"(barrier), "l"(policy)
        : "memory");
}

// The policy of data that is read once: it gives way in L2 before anything else, 9.7.9.19.
SPLITKV_DEVICE uint64_t createpolicy_evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Brings a box of a rank-3 map into L2.
SPLITKV_DEVICE void cp_async_bulk_prefetch_tensor_3d(const CUtensorMap* map, int column, int head,
                                                     int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map),
                 "r"(column), "r"(head), "r"(row)
                 : "memory");
}

SPLITKV_DEVICE void prefetch_tensormap(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Plain bytes from global memory, both sides aligned to 16; completes on the barrier.
SPLITKV_DEVICE void cp_async_bulk_load(uint32_t target, const void* source, uint32_t bytes,
                                       uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(target),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// Adds the box of fp32 values in shared memory to a rank-3 map at {column, head, row}; what lies
// outside the tensor is dropped. The order of adds is not fixed.
SPLITKV_DEVICE void cp_reduce_async_bulk_tensor_3d_add(const CUtensorMap* map, uint32_t source,
                                                       int column, int head, int row) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group "
        "[%0, {%1, %2, %3}], [%4];" ::"l"(map),
        "r"(column), "r"(head), "r"(row), "r"(source)
        : "memory");
}

// Writes the box of values in shared memory to a rank-3 map at {column, head, row}; what lies
// outside the tensor is dropped.
SPLITKV_DEVICE void cp_async_bulk_tensor_3d_store(const CUtensorMap* map, uint32_t source,
                                                  int column, int head, int row) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group "
        "[%0, {%1, %2, %3}], [%4];" ::"l"(map),
        "r"(column), "r"(head), "r"(row), "r"(source)
        : "memory");
}

SPLITKV_DEVICE void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but kPending bulk groups of this thread have read their shared memory.
template <int kPending>
SPLITKV_DEVICE void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all but kPending bulk groups of this thread are complete and visible.
template <int kPending>
SPLITKV_DEVICE void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Orders ordinary shared-memory writes before reads by wgmma and bulk copies, 9.7.13.4.
SPLITKV_DEVICE void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory, between bulk copies and other accesses of this thread.
SPLITKV_DEVICE void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- turns in global memory, 9.7.9.8, 9.7.13.14 ----

SPLITKV_DEVICE int32_t ld_acquire_gpu(const int32_t* source) {
    int32_t value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
    return value;
}

SPLITKV_DEVICE void red_release_gpu_add(int32_t* target, int32_t value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(target), "r"(value) : "memory");
}

// ---- registers and scalars ----

// %laneid, 10.3, anew at each call: nothing that depends on it is kept in a register over a loop.
SPLITKV_DEVICE int laneid() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

template <int kRegisters>
SPLITKV_DEVICE void setmaxnreg_inc() {  // 9.7.19.5
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
SPLITKV_DEVICE void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

SPLITKV_DEVICE float ex2_approx(float x) {  // 9.7.3.21; 2^x, 0 for -inf
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two fp32 to two 16-bit values, round to nearest even; `low` lands in the low half, 9.7.9.21.
template <typename Element>
SPLITKV_DEVICE uint32_t cvt_rn_x2(float low, float high) {
    uint32_t packed;
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
}

// The reverse.
template <typename Element>
SPLITKV_DEVICE float2 cvt_f32_x2(uint32_t packed) {
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
        // bf16 is the upper half of fp32.
        return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
    } else {
        return __half22float2(*reinterpret_cast<const __half2*>(&packed));
    }
}

// A store that never happens, as x <= limit, but that ptxas cannot drop: what x depends on is
// computed before the volatile asm that follows, such as wgmma_wait_group.
SPLITKV_DEVICE void st_shared_if_above(uint32_t target, float x, float limit) {
    asm volatile(
        "{\n\t"
        ".reg .pred never;\n\t"
        "setp.gt.f32 never, %1, %2;\n\t"
        "@never st.shared.f32 [%0], %1;\n\t"
        "}" ::"r"(target),
        "f"(x), "f"(limit)
        : "memory");
}

SPLITKV_DEVICE void st_shared_v2_f32(uint32_t target, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(target), "f"(a), "f"(b) : "memory");
}

// Four 8x8 matrices of 16-bit values from registers to shared memory, 9.7.15.5.8.
SPLITKV_DEVICE void stmatrix_x4(uint32_t target, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(target),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// The reverse of stmatrix_x4, 9.7.14.5.15.
SPLITKV_DEVICE void ldmatrix_x4(uint32_t source, uint32_t (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(source)
                 : "memory");
}

SPLITKV_DEVICE void stmatrix_x4_trans(uint32_t target, const uint32_t (&r)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(target),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
}

// ---- wgmma, 9.7.15.7 ----

SPLITKV_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

SPLITKV_DEVICE void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
SPLITKV_DEVICE void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of the accumulators across this point; no instruction.
template <int kRegisters>
SPLITKV_DEVICE void pin(float (&d)[kRegisters]) {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d[64, N] (+)= a[64, 16] b[16, N] for one warpgroup, N = 2 * the registers of d, fp32 sums.
// a comes from shared memory (ss) or registers (rs), b from shared memory. kTransA and kTransB say
// that the operand is stored with M or N contiguous. Descriptors: see descriptor.cuh.
// With accumulate = 0 the old d is ignored.
#define SPLITKV_REGS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SPLITKV_REGS_32 \
    SPLITKV_REGS_16     \
    ", "                \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SPLITKV_REGS_40 \
    SPLITKV_REGS_32     \
    ", "                \
    "%32, %33, %34, %35, %36, %37, %38, %39"
#define SPLITKV_REGS_48 \
    SPLITKV_REGS_40     \
    ", "                \
    "%40, %41, %42, %43, %44, %45, %46, %47"
#define SPLITKV_REGS_64 \
    SPLITKV_REGS_48     \
    ", "                \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SPLITKV_REGS_88                                                              \
    SPLITKV_REGS_64                                                                  \
    ", "                                                                             \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", "                                                                             \
    "%80, %81, %82, %83, %84, %85, %86, %87"
#define SPLITKV_REGS_96 \
    SPLITKV_REGS_88     \
    ", "                \
    "%88, %89, %90, %91, %92, %93, %94, %95"
#define SPLITKV_REGS_128                                                                     \
    SPLITKV_REGS_96                                                                          \
    ", "                                                                                     \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
    "%111"                                                                                   \
    ", "                                                                                     \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "   \
    "%126, %127"
#define SPLITKV_ACC_8(d, i)                                                                     \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define SPLITKV_ACC_16(d, i) SPLITKV_ACC_8(d, i), SPLITKV_ACC_8(d, i + 8)
#define SPLITKV_ACC_32(d, i) SPLITKV_ACC_16(d, i), SPLITKV_ACC_16(d, i + 16)
#define SPLITKV_ACC_40(d, i) SPLITKV_ACC_32(d, i), SPLITKV_ACC_8(d, i + 32)
#define SPLITKV_ACC_48(d, i) SPLITKV_ACC_40(d, i), SPLITKV_ACC_8(d, i + 40)
#define SPLITKV_ACC_64(d, i) SPLITKV_ACC_32(d, i), SPLITKV_ACC_32(d, i + 32)
#define SPLITKV_ACC_88(d, i)                                                  \
    SPLITKV_ACC_64(d, i), SPLITKV_ACC_8(d, i + 64), SPLITKV_ACC_8(d, i + 72), \
        SPLITKV_ACC_8(d, i + 80)
#define SPLITKV_ACC_96(d, i) SPLITKV_ACC_64(d, i), SPLITKV_ACC_32(d, i + 64)
#define SPLITKV_ACC_128(d, i) SPLITKV_ACC_64(d, i), SPLITKV_ACC_64(d, i + 64)

#define SPLITKV_WGMMA_SS(N, R, TYPE, A, B, S, TA, TB)                                           \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #S                                    \
                 ", 0;\n\t"                                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                \
                 " {" SPLITKV_REGS_##R "}, %" #A ", %" #B ", p, 1, 1, %" #TA ", %" #TB ";\n\t}" \
                 : SPLITKV_ACC_##R(d, 0)                                                        \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB))

#define SPLITKV_WGMMA_RS(N, R, TYPE, A0, A1, A2, A3, B, S, TB)                                \
    asm volatile(                                                                             \
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #S                                           \
        ", 0;\n\t"                                                                            \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" SPLITKV_REGS_##R \
        "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, %" #TB ";\n\t}"       \
        : SPLITKV_ACC_##R(d, 0)                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB))

// R registers, then the numbers of the operands that follow them.
#define SPLITKV_DEFINE_WGMMA(N, R, P0, P1, P2, P3, P4, P5, P6)                            \
    template <typename Element, int kTransA, int kTransB>                                 \
    SPLITKV_DEVICE void wgmma_ss(float (&d)[R], uint64_t a, uint64_t b, int accumulate) { \
        if constexpr (std::is_same_v<Element, __nv_bfloat16>) {                           \
            SPLITKV_WGMMA_SS(N, R, "bf16", P0, P1, P2, P3, P4);                           \
        } else {                                                                          \
            SPLITKV_WGMMA_SS(N, R, "f16", P0, P1, P2, P3, P4);                            \
        }                                                                                 \
    }                                                                                     \
    template <typename Element, int kTransB>                                              \
    SPLITKV_DEVICE void wgmma_rs(float (&d)[R], const uint32_t (&a)[4], uint64_t b,       \
                                 int accumulate) {                                        \
        if constexpr (std::is_same_v<Element, __nv_bfloat16>) {                           \
            SPLITKV_WGMMA_RS(N, R, "bf16", P0, P1, P2, P3, P4, P5, P6);                   \
        } else {                                                                          \
            SPLITKV_WGMMA_RS(N, R, "f16", P0, P1, P2, P3, P4, P5, P6);                    \
        }                                                                                 \
    }

SPLITKV_DEFINE_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
SPLITKV_DEFINE_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
SPLITKV_DEFINE_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
SPLITKV_DEFINE_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
SPLITKV_DEFINE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
SPLITKV_DEFINE_WGMMA(176, 88, 88, 89, 90, 91, 92, 93, 94)
SPLITKV_DEFINE_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
SPLITKV_DEFINE_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef SPLITKV_DEFINE_WGMMA
#undef SPLITKV_WGMMA_RS
#undef SPLITKV_WGMMA_SS

}  // namespace splitkv::sm90::ptx
