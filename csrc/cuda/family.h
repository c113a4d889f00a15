// Which kernels a device runs. Host code, no CUDA.
#pragma once

#include <cstdint>
#include <string>

namespace splitkv::cuda {

enum class Family : int64_t {
    kSm90 = 0,  // compute capability 9.0: wgmma and TMA
    kSm80 = 1,  // all others from 8.0 on: mma.sync and cp.async, which every newer card runs too
};

// The family for a device of this compute capability, or the forced one. Throws
// std::invalid_argument below 8.0.
Family family_of(int major, int minor);

// "sm90" or "sm80", and back; the latter throws for any other name.
std::string family_name(Family family);
Family family_from_name(const std::string& name);

// For debugging and tests, for the whole process: "sm80" on any device; "auto" ends it. Throws
// std::invalid_argument for any other name.
void force_family(const std::string& name);

}  // namespace splitkv::cuda
