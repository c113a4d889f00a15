// The ring of shared-memory stages between the TMA warp and the consumer warpgroups.
#pragma once

#include <cstdint>

#include "cuda/sm90/ptx.cuh"

namespace splitkv::sm90 {

// Walks the stages of a ring; `parity` is that of the phase of the stage's barriers to wait for.
// Producer and consumer each hold one. A producer waits with parity ^ 1: a fresh ring is empty.
template <int kNumStages>
struct RingCursor {
    int stage = 0;
    uint32_t parity = 0;

    SPLITKV_DEVICE void advance() {
        if (++stage == kNumStages) {
            stage = 0;
            parity ^= 1;
        }
    }
    SPLITKV_DEVICE RingCursor previous() const {
        return stage == 0 ? RingCursor{kNumStages - 1, parity ^ 1} : RingCursor{stage - 1, parity};
    }
};

// Barriers of one ring: full[i] completes when stage i has been written, empty[i] when every
// consumer has arrived after reading it.
template <int kNumStages>
struct RingBarriers {
    uint64_t full[kNumStages];
    uint64_t empty[kNumStages];

    SPLITKV_DEVICE void init(uint32_t num_consumers) { init(1, num_consumers); }
    SPLITKV_DEVICE void init(uint32_t num_producers, uint32_t num_consumers) {
        for (int i = 0; i < kNumStages; ++i) {
            ptx::mbarrier_init(ptx::smem_address(&full[i]), num_producers);
            ptx::mbarrier_init(ptx::smem_address(&empty[i]), num_consumers);
        }
    }
    SPLITKV_DEVICE uint32_t full_address(int stage) const {
        return ptx::smem_address(full) + stage * static_cast<uint32_t>(sizeof(uint64_t));
    }
    SPLITKV_DEVICE uint32_t empty_address(int stage) const {
        return ptx::smem_address(empty) + stage * static_cast<uint32_t>(sizeof(uint64_t));
    }
    SPLITKV_DEVICE void wait_full(const RingCursor<kNumStages>& at) const {
        ptx::mbarrier_wait(full_address(at.stage), at.parity);
    }
    SPLITKV_DEVICE void wait_empty(const RingCursor<kNumStages>& at) const {
        ptx::mbarrier_wait(empty_address(at.stage), at.parity ^ 1);
    }
    // Waits for the consumers of what was written at this place of the ring, not the round before.
    SPLITKV_DEVICE void wait_empty_of(const RingCursor<kNumStages>& at) const {
        ptx::mbarrier_wait(empty_address(at.stage), at.parity);
    }
    // By one thread of each consumer, or by all of them, after its reads.
    SPLITKV_DEVICE void release(const RingCursor<kNumStages>& at) const {
        ptx::mbarrier_arrive(empty_address(at.stage));
    }
};

}  // namespace splitkv::sm90
