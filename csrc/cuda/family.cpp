#include "cuda/family.h"

#include <atomic>

#include "common/check.h"

namespace splitkv::cuda {
namespace {

constexpr const char* kSm90Name = "sm90";
constexpr const char* kSm80Name = "sm80";

// Set by force_family only.
std::atomic<bool> is_sm80_forced{false};

}  // namespace

Family family_of(int major, int minor) {
    SPLITKV_CHECK(major >= 8, "compute capability ", major, ".", minor, " needs to be 8.0 or more");
    const bool is_hopper = major == 9 && minor == 0;
    return is_hopper && !is_sm80_forced.load(std::memory_order_acquire) ? Family::kSm90
                                                                        : Family::kSm80;
}

std::string family_name(Family family) { return family == Family::kSm90 ? kSm90Name : kSm80Name; }

Family family_from_name(const std::string& name) {
    SPLITKV_CHECK(name == kSm90Name || name == kSm80Name, "kernel family '", name,
                  "' is not one of: ", kSm90Name, " ", kSm80Name);
    return name == kSm90Name ? Family::kSm90 : Family::kSm80;
}

void force_family(const std::string& name) {
    SPLITKV_CHECK(name == "auto" || name == kSm80Name, "kernel family '", name,
                  "' cannot be forced, needs one of: auto ", kSm80Name);
    is_sm80_forced.store(name == kSm80Name, std::memory_order_release);
}

}  // namespace splitkv::cuda
