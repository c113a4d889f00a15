// pack: rows of several tensors side by side, as they travel. A CTA writes one packed row, field
// after field, in the widest words that the field's addresses and sizes allow.
#include "attention/checks.h"
#include "cuda/backend.h"
#include "cuda/launch.h"

namespace splitkv::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kInFlight = 4;  // words that a thread loads before it stores the first

template <typename Word>
__device__ __forceinline__ void copy_words(const char* __restrict__ source,
                                           char* __restrict__ target, int64_t num_bytes) {
    const auto* from = reinterpret_cast<const Word*>(source);
    auto* to = reinterpret_cast<Word*>(target);
    const int num_words = static_cast<int>(num_bytes / static_cast<int64_t>(sizeof(Word)));
#pragma unroll kInFlight
    for (int i = static_cast<int>(threadIdx.x); i < num_words; i += kThreads) to[i] = from[i];
}

// Whether every row of the field can be copied in such words.
template <typename Word>
__device__ __forceinline__ bool fits(const PackField& field) {
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(field.source));
    return ((address | field.row_stride | field.begin | field.end) & (sizeof(Word) - 1)) == 0;
}

__device__ __forceinline__ void clear(char* packed, int64_t begin, int64_t end) {
    for (int64_t byte = begin + threadIdx.x; byte < end; byte += kThreads) packed[byte] = 0;
}

__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackParams params) {
    const int64_t row = blockIdx.x;
    const int64_t source_row = params.index == nullptr ? row : params.index[row];
    char* packed = params.packed + row * params.row_bytes;
    int64_t end = 0;  // of what is written
    for (int i = 0; i < params.num_fields; ++i) {
        const PackField& field = params.fields[i];
        clear(packed, end, field.begin);
        const char* source = field.source + source_row * field.row_stride;
        const int64_t num_bytes = field.end - field.begin;
        if (fits<uint4>(field)) {
            copy_words<uint4>(source, packed + field.begin, num_bytes);
        } else if (fits<uint32_t>(field)) {
            copy_words<uint32_t>(source, packed + field.begin, num_bytes);
        } else {
            copy_words<char>(source, packed + field.begin, num_bytes);
        }
        end = field.end;
    }
    clear(packed, end, params.row_bytes);
}

}  // namespace

void pack(const PackParams& params) {
    if (params.num_rows == 0) return;
    constexpr int64_t kWidest = sizeof(uint4);
    SPLITKV_CHECK(params.row_bytes % kWidest == 0 &&
                      reinterpret_cast<uintptr_t>(params.packed) % kWidest == 0,
                  "packed has rows of ", params.row_bytes, " bytes, needs multiples of ", kWidest,
                  ", also of its address, on CUDA");
    SPLITKV_CHECK(params.num_rows < INT32_MAX, "packed has ", params.num_rows,
                  " rows, needs less than 2^31 - 1");
    const DeviceGuard guard(params.launch.device_index);
    LaunchConfig config{};
    config.grid = dim3(static_cast<unsigned>(params.num_rows));
    config.block = dim3(kThreads);
    config.cluster = no_cluster();
    config.stream = static_cast<cudaStream_t>(params.launch.stream);
    launch(pack_kernel, config, params);
}

}  // namespace splitkv::cuda
