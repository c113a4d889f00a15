// Chooses the instruction set at run time.
#include <atomic>
#include <string>
#include <vector>

#include "common/check.h"
#include "cpu/backend.h"
#include "cpu/isa.h"

namespace splitkv::cpu {
namespace {

// Best first; the baseline is always there. Asks for each option that CMakeLists.txt gives a file.
std::vector<const Isa*> available_isas() {
    std::vector<const Isa*> isas;
#if defined(__x86_64__)
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        isas.push_back(&avx512::kIsa);
    }
    if (has_avx2) isas.push_back(&avx2::kIsa);
#endif
    isas.push_back(&baseline::kIsa);
    return isas;
}

// Set by force_isa only; nullptr means the best one.
std::atomic<const Isa*> forced_isa{nullptr};

}  // namespace

const Isa& current_isa() {
    static const Isa& best = *available_isas().front();
    const Isa* forced = forced_isa.load(std::memory_order_acquire);
    return forced != nullptr ? *forced : best;
}

std::string isa_names() {
    std::string names;
    for (const Isa* isa : available_isas())
        names += (names.empty() ? "" : " ") + std::string(isa->name);
    return names;
}

std::string current_isa_name() { return current_isa().name; }

void force_isa(const std::string& name) {
    if (name == "auto") {
        forced_isa.store(nullptr, std::memory_order_release);
        return;
    }
    for (const Isa* isa : available_isas()) {
        if (name == isa->name) {
            forced_isa.store(isa, std::memory_order_release);
            return;
        }
    }
    throw_invalid("instruction set '", name, "' is not one of: auto ", isa_names());
}

}  // namespace splitkv::cpu
