#include "cuda/backward_parts.h"

#include <algorithm>
#include <functional>
#include <queue>

namespace splitkv::cuda {
namespace {

// Microseconds of a call whose KV tiles are cut into parts of at most max_steps steps.
class CostModel {
  public:
    CostModel(const BackwardWorkRequest& request, const BackwardCut& cut,
              const std::vector<int64_t>& num_steps)
        : request_(request), num_steps_(num_steps) {
        // 570 TFLOP/s over 132 SMs; 130 over the 108 of an A100.
        const double flops_per_us = request.family == Family::kSm90 ? 4.3e6 : 1.2e6;
        const double dims = 3.0 * static_cast<double>(request.head_dim_qk) +
                            2.0 * static_cast<double>(request.head_dim_v);
        step_us_ = 2.0 * cut.tile_rows * cut.tile_keys * dims / flops_per_us *
                   static_cast<double>(cut.tile_heads_per_kv_head);
    }

    // Longest first onto the SM that is free first, as the kernel's counter hands items out.
    double microseconds(int64_t max_steps) const {
        constexpr double kItemUs = 5.0;  // keys loaded, gradients added; nothing hides them
        constexpr double kTurnUs = 3.0;  // parts of a KV tile end together and add one by one
        std::vector<int64_t> parts;
        int64_t most_parts = 1;
        for (const int64_t steps : num_steps_) {
            const int64_t num_parts = (steps + max_steps - 1) / max_steps;
            most_parts = std::max(most_parts, num_parts);
            for (int64_t i = 0; i < num_parts; ++i) parts.push_back((steps + i) / num_parts);
        }
        std::sort(parts.begin(), parts.end(), std::greater<>());
        std::priority_queue<double, std::vector<double>, std::greater<>> free_at;
        for (int32_t sm = 0; sm < request_.num_sms; ++sm) free_at.push(0.0);
        double last = 0.0;
        for (const int64_t steps : parts) {
            for (int64_t head = 0; head < request_.num_heads_kv; ++head) {
                const double end = free_at.top() + static_cast<double>(steps) * step_us_ + kItemUs;
                free_at.pop();
                free_at.push(end);
                last = std::max(last, end);
            }
        }
        return last + static_cast<double>(most_parts - 1) * kTurnUs;
    }

  private:
    const BackwardWorkRequest& request_;
    const std::vector<int64_t>& num_steps_;
    double step_us_;
};

// How long the parts of a KV tile are: even, of at most `steps` steps, or each half of what is left
// and no less than `steps`.
struct PartLength {
    int64_t steps;
    bool is_halved;
};

// Whether nearly all steps are of KV tiles that have about as many as the dearest.
bool are_alike(const std::vector<int64_t>& num_steps, int64_t dearest) {
    int64_t total = 0;
    int64_t alike = 0;
    for (const int64_t steps : num_steps) {
        total += steps;
        if (steps * 5 >= dearest * 4) alike += steps;
    }
    return alike * 8 >= total * 7;
}

// Whether whole KV tiles, all alike, leave at most 5 % of the SMs' time empty.
bool fill_waves(const BackwardWorkRequest& request, int64_t dearest, int64_t total) {
    const int64_t wave = dearest * request.num_sms;
    const int64_t num_waves = (total + wave - 1) / wave;
    return total * 20 >= num_waves * wave * 19;
}

// The steps of the dearest KV tile where splitting does not pay.
PartLength choose_length(const BackwardWorkRequest& request, const BackwardCut& cut,
                         const std::vector<int64_t>& num_steps) {
    int64_t dearest = 1;
    int64_t total = 0;
    for (const int64_t steps : num_steps) {
        dearest = std::max(dearest, steps);
        total += steps * request.num_heads_kv;
    }
    constexpr int64_t kManyWaves = 8;  // beyond this a split has nothing to even out
    if (dearest * request.num_sms * kManyWaves <= total) return {dearest, false};
    // Items run at speeds that differ by up to a third, for what they find in L2. One that takes
    // more than a quarter of an SM's share would end last. Far above the share KV tiles are few,
    // and the model below finds how many parts they need.
    constexpr int64_t kItemsPerSm = 4;
    const int64_t share = total / request.num_sms;
    if (dearest * kItemsPerSm > share && dearest * 4 <= share * 5) {
        // Alike items run side by side and at one speed: what is lost is the rest of the last wave.
        // Parts that get shorter fill it: 8192 rows against 16K keys took 4 % less time.
        if (are_alike(num_steps, dearest)) {
            constexpr int64_t kHalvings = 3;
            if (fill_waves(request, dearest, total)) return {dearest, false};
            return {std::max<int64_t>(1, dearest >> kHalvings), true};
        }
        // All are cut to the length of the parts of the dearest: one left whole, as it is a little
        // shorter, would end last instead.
        const int64_t num_parts = (dearest * kItemsPerSm + share - 1) / share;
        return {(dearest + num_parts - 1) / num_parts, false};
    }
    const CostModel model(request, cut, num_steps);
    int64_t best = dearest;
    double best_us = model.microseconds(dearest);
    constexpr double kWorthwhile = 0.97;
    for (const int64_t num_parts : {2, 3, 4, 6, 8, 12, 16, 24, 32, 48}) {
        const int64_t max_steps = (dearest + num_parts - 1) / num_parts;
        const double us = model.microseconds(max_steps);
        if (us < kWorthwhile * best_us) {
            best_us = us;
            best = max_steps;
        }
    }
    return {best, false};
}

std::vector<BackwardPart> even_parts(int64_t num_steps, int64_t max_steps) {
    const int64_t num_parts = (num_steps + max_steps - 1) / max_steps;
    std::vector<BackwardPart> parts;
    // Longer parts first: a later one must not be handed out before an earlier one.
    int64_t first = 0;
    for (int64_t part = 0; part < num_parts; ++part) {
        const int64_t last = first + (num_steps + num_parts - 1 - part) / num_parts;
        parts.push_back({0, first, last});
        first = last;
    }
    return parts;
}

std::vector<BackwardPart> halved_parts(int64_t num_steps, int64_t least) {
    std::vector<BackwardPart> parts;
    for (int64_t first = 0; first < num_steps;) {
        const int64_t left = num_steps - first;
        // A rest below half of the least length goes to the part before.
        const int64_t taken = 2 * left <= 3 * least ? left : std::max((left + 1) / 2, least);
        parts.push_back({0, first, first + taken});
        first += taken;
    }
    return parts;
}

// How rows are cut into bands, so that the items that run together find the rows of their band in
// L2, where all rows of a KV head do not fit it.
struct Bands {
    int64_t num_tiles;  // row tiles of each band; 0: all rows are one band
    bool is_head_major;
    int64_t stagger;
};

// KV tiles that see a row tile, on the mean over all pairs of the two.
double mean_visits(const std::vector<BackwardSegments>& segments, size_t num_tiles) {
    std::vector<int64_t> visits(num_tiles + 1, 0);
    for (const BackwardSegments& of_kv_tile : segments) {
        for (const BackwardSegment& segment : of_kv_tile) {
            ++visits[segment.first_tile];
            --visits[segment.first_tile + segment.num_tiles];
        }
    }
    double sum = 0.0, squares = 0.0;
    int64_t here = 0;
    for (const int64_t change : visits) {
        here += change;
        sum += static_cast<double>(here);
        squares += static_cast<double>(here) * static_cast<double>(here);
    }
    return sum > 0.0 ? squares / sum : 0.0;
}

Bands choose_bands(const BackwardWorkRequest& request, const BackwardCut& cut,
                   const std::vector<BackwardSegments>& segments,
                   const std::vector<int64_t>& num_steps) {
    constexpr int64_t kHeldBytes = 48 << 20;  // the L2 of an H200
    // Of a band, whichever is more: for all heads of the group, and for one, as heads take turns.
    constexpr int64_t kGroupBytes = 16 << 20;
    constexpr int64_t kHeadBytes = 4 << 20;
    constexpr int64_t kTilesOfFewVisits = 32;
    constexpr double kSmsOfBand = 0.65;     // bands lost 20 % with 75 tiles and won 4 % with 94
    constexpr int64_t kStagger = 2;         // steps, 4 us at head dim 128
    constexpr int64_t kWaves = 6;           // of items, at least
    constexpr int64_t kMaxItems = 1 << 17;  // of one head; a list takes 48 bytes for each
    const auto num_tiles = static_cast<int64_t>(cut.tiles.size());
    const auto num_kv_tiles = static_cast<int64_t>(num_steps.size());
    const int64_t work_of_band = num_kv_tiles * request.num_heads_kv;
    const int64_t tile_bytes = cut.tile_rows * bytes_of_row(request);
    const int64_t group_bytes = tile_bytes * cut.tile_heads_per_kv_head;
    // Wide head dims were not measured in bands. Where dq is added to in turn, a KV tile waits for
    // the one before at each row tile of a band.
    const bool may_have_bands = request.family == Family::kSm90 && request.head_dim_qk <= 128;
    if (!may_have_bands || request.is_deterministic || num_tiles * group_bytes <= kHeldBytes ||
        work_of_band * 4 < request.num_sms) {
        return {};
    }
    const int64_t least_bands = (kWaves * request.num_sms + work_of_band - 1) / work_of_band;
    const int64_t most_bands = std::max<int64_t>(1, kMaxItems / num_kv_tiles);
    // Few visits: rows come from memory anyway, and heads side by side share the adds that miss L2.
    // Else the KV tiles of one head that see a band must be enough for most SMs.
    const bool is_head_major = !has_few_visits(num_steps, num_tiles);
    if (is_head_major && (num_kv_tiles < request.num_sms ||
                          mean_visits(segments, cut.tiles.size()) < kSmsOfBand * request.num_sms)) {
        return {};
    }
    const int64_t held = is_head_major
                             ? std::max(kGroupBytes / group_bytes, kHeadBytes / tile_bytes)
                             : kTilesOfFewVisits;
    const int64_t size =
        std::max({std::min(held, num_tiles / least_bands), num_tiles / most_bands, int64_t{1}});
    if (size >= num_tiles) return {};
    return {size, is_head_major, is_head_major ? kStagger : 0};
}

// Where bands end, in row tiles. The last ones are short, so that the SMs end together.
std::vector<int64_t> band_ends(int64_t num_tiles, int64_t tiles_of_band) {
    const int64_t least = std::max<int64_t>(1, tiles_of_band / 4);
    std::vector<int64_t> ends;
    for (int64_t end = 0; end < num_tiles; ends.push_back(end)) {
        const int64_t left = num_tiles - end;
        end +=
            left >= 2 * tiles_of_band ? tiles_of_band : std::min(left, std::max(least, left / 2));
    }
    return ends;
}

// One part for each band that has row tiles of the segments.
std::vector<BackwardPart> parts_by_bands(const BackwardSegments& segments,
                                         const std::vector<int64_t>& ends) {
    std::vector<BackwardPart> parts;
    size_t band = 0;
    int64_t steps = 0;
    for (const BackwardSegment& segment : segments) {
        int64_t tile = segment.first_tile;
        const int64_t end_tile = tile + segment.num_tiles;
        while (tile < end_tile) {
            while (ends[band] <= tile) ++band;
            const int64_t end = std::min(end_tile, ends[band]);
            if (parts.empty() || parts.back().band != static_cast<int32_t>(band)) {
                parts.push_back({static_cast<int32_t>(band), steps, steps});
            }
            steps += end - tile;
            parts.back().last_step = steps;
            tile = end;
        }
    }
    return parts;
}

}  // namespace

int64_t num_steps_of(const BackwardSegments& segments) {
    int64_t steps = 0;
    for (const BackwardSegment& segment : segments) steps += segment.num_tiles;
    return steps;
}

bool has_few_visits(const std::vector<int64_t>& num_steps, int64_t num_row_tiles) {
    constexpr int64_t kFewVisits = 32;  // of a row tile
    int64_t visits = 0;
    for (const int64_t steps : num_steps) visits += steps;
    return visits < kFewVisits * num_row_tiles;
}

int64_t bytes_of_row(const BackwardWorkRequest& request) {
    return request.head_dim_qk * (2 + 4) + request.head_dim_v * 2;
}

BackwardParts divide_steps(const BackwardWorkRequest& request, const BackwardCut& cut,
                           const std::vector<BackwardSegments>& segments,
                           const std::vector<int64_t>& num_steps) {
    BackwardParts parts{};
    parts.of_kv_tile.resize(segments.size());
    parts.num_bands = 1;
    const Bands bands = choose_bands(request, cut, segments, num_steps);
    if (bands.num_tiles > 0) {
        const std::vector<int64_t> ends =
            band_ends(static_cast<int64_t>(cut.tiles.size()), bands.num_tiles);
        for (size_t i = 0; i < segments.size(); ++i) {
            parts.of_kv_tile[i] = parts_by_bands(segments[i], ends);
        }
        parts.num_bands = static_cast<int32_t>(ends.size());
        parts.is_head_major = bands.is_head_major;
        parts.stagger = bands.stagger;
        return parts;
    }
    const PartLength length = choose_length(request, cut, num_steps);
    for (size_t i = 0; i < segments.size(); ++i) {
        const int64_t steps = num_steps_of(segments[i]);
        if (steps == 0) continue;
        parts.of_kv_tile[i] =
            length.is_halved ? halved_parts(steps, length.steps) : even_parts(steps, length.steps);
    }
    return parts;
}

}  // namespace splitkv::cuda
