// Every PTX instruction of the sm_80 kernels, one function each, named after the instruction.
// Section numbers are those of the PTX ISA 9.0 manual.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#define SPLITKV_DEVICE __device__ __forceinline__

namespace splitkv::sm80::ptx {

SPLITKV_DEVICE uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- asynchronous copies, 9.7.9.25 ----

// 16 bytes from global to shared memory, or 16 zeros without reading anything.
SPLITKV_DEVICE void cp_async_16(uint32_t target, const void* source, bool is_read) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(is_read ? 16 : 0)
                 : "memory");
}

// 4 bytes, or 4 zeros.
SPLITKV_DEVICE void cp_async_4(uint32_t target, const void* source, bool is_read) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source),
                 "r"(is_read ? 4 : 0)
                 : "memory");
}

SPLITKV_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but kPending groups of this thread have landed.
template <int kPending>
SPLITKV_DEVICE void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- matrix instructions, 9.7.14.5 ----

// Four 8 x 8 matrices of 16-bit values; lane 8 i + r gives the address of row r of matrix i.
SPLITKV_DEVICE void ldmatrix_x4(uint32_t (&d)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}

// The same, each matrix transposed.
SPLITKV_DEVICE void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}

// d += a . b, 16 x 16 by 16 x 8. d[0], d[1] lie in row lane / 4, columns 2 (lane % 4) and the next
// one; d[2], d[3] are 8 rows below.
template <typename Element>
SPLITKV_DEVICE void mma_m16n8k16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// ---- arithmetic ----

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

// ---- order between CTAs, 9.7.9.8 and 9.7.9.11 ----

SPLITKV_DEVICE int32_t ld_acquire(const int32_t* address) {
    int32_t value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

SPLITKV_DEVICE void st_release(int32_t* address, int32_t value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

}  // namespace splitkv::sm80::ptx
