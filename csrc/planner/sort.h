// Stable order of many items by an integer key, in time that goes with their number.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace splitkv::planner {

// Key, which is not negative, and index of an item.
using Keyed = std::pair<int64_t, int64_t>;

// Sorts entries whose indices ascend by key, equal keys by index: by digits, lowest first, those
// that are the same in all keys left out. Comparing wins where there are few.
inline void sort_by_key(std::vector<Keyed>& entries) {
    constexpr size_t kFew = 512;
    constexpr int kDigitBits = 11;
    constexpr int64_t kDigits = int64_t{1} << kDigitBits;
    if (entries.size() < kFew) {
        std::sort(entries.begin(), entries.end());
        return;
    }
    int64_t varying = 0;
    for (const Keyed& entry : entries) varying |= entry.first ^ entries.front().first;
    std::vector<Keyed> sorted(entries.size());
    for (int shift = 0; shift < 63 && varying >> shift != 0; shift += kDigitBits) {
        if ((varying >> shift & (kDigits - 1)) == 0) continue;
        const auto digit = [shift](const Keyed& entry) {
            return entry.first >> shift & (kDigits - 1);
        };
        size_t next[kDigits] = {};
        for (const Keyed& entry : entries) ++next[digit(entry)];
        size_t sum = 0;
        for (size_t& count : next) sum += std::exchange(count, sum);
        for (const Keyed& entry : entries) sorted[next[digit(entry)]++] = entry;
        entries.swap(sorted);
    }
}

}  // namespace splitkv::planner
