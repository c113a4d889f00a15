// How this library meets the CUDA runtime: checks, the device guard, and the one kernel launch.
// Host code only. The runtime is linked statically and finds the driver when first called, so the
// module imports on a machine without GPU or driver.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/check.h"

// Throws with the call and the runtime's own message.
#define SPLITKV_CUDA_CHECK(call)                                        \
    do {                                                                \
        const cudaError_t splitkv_status = (call);                      \
        SPLITKV_CHECK(splitkv_status == cudaSuccess, #call,             \
                      " failed: ", cudaGetErrorString(splitkv_status)); \
    } while (0)

namespace splitkv::cuda {

// Makes a device current for this thread, and the previous one again at the end of the scope.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device) {
        SPLITKV_CUDA_CHECK(cudaGetDevice(&previous_));
        if (previous_ != device) {
            SPLITKV_CUDA_CHECK(cudaSetDevice(device));
            is_switched_ = true;
        }
    }
    ~DeviceGuard() {
        if (is_switched_) cudaSetDevice(previous_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    int previous_ = 0;
    bool is_switched_ = false;
};

inline int num_sms(int device) {
    int count = 0;
    SPLITKV_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
}

// Programmatic launches came with compute capability 9.0; newer devices run code that was compiled
// for 8.0, where a kernel cannot wait for the one before.
inline bool can_overlap_launches() {
    int device = 0;
    int major = 0;
    SPLITKV_CUDA_CHECK(cudaGetDevice(&device));
    SPLITKV_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major == 9;
}

struct LaunchConfig {
    dim3 grid;
    dim3 block;
    dim3 cluster;        // {1, 1, 1} for none
    int64_t smem_bytes;  // dynamic shared memory
    cudaStream_t stream;
    // Start while the kernel before is still ending, where the device can; it must call
    // cudaGridDependencySynchronize() before it reads what that kernel wrote.
    bool overlaps_previous;
};

inline dim3 no_cluster() { return dim3(1, 1, 1); }

// The only way a kernel of this library starts. Capturable; does not synchronize.
template <typename Params>
void launch(void (*kernel)(Params), const LaunchConfig& config, const Params& params) {
    constexpr int64_t kDefaultSmemBytes = 48 * 1024;  // more than this must be asked for
    if (config.smem_bytes > kDefaultSmemBytes) {
        SPLITKV_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                static_cast<int>(config.smem_bytes)));
    }
    cudaLaunchAttribute attributes[2] = {};
    unsigned num_attributes = 0;
    if (config.cluster.x * config.cluster.y * config.cluster.z > 1) {
        cudaLaunchAttribute& cluster = attributes[num_attributes++];
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = config.cluster.x;
        cluster.val.clusterDim.y = config.cluster.y;
        cluster.val.clusterDim.z = config.cluster.z;
    }
    if (config.overlaps_previous && can_overlap_launches()) {
        cudaLaunchAttribute& overlap = attributes[num_attributes++];
        overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        overlap.val.programmaticStreamSerializationAllowed = 1;
    }

    cudaLaunchConfig_t launch_config{};
    launch_config.gridDim = config.grid;
    launch_config.blockDim = config.block;
    launch_config.dynamicSmemBytes = static_cast<size_t>(config.smem_bytes);
    launch_config.stream = config.stream;
    launch_config.attrs = attributes;
    launch_config.numAttrs = num_attributes;
    SPLITKV_CUDA_CHECK(cudaLaunchKernelEx(&launch_config, kernel, params));
}

}  // namespace splitkv::cuda
