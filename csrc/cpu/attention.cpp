// Drivers of the CPU kernels: hand out work to threads, and memory to each thread.
// Results don't depend on the number of threads: a forward tile and a merged row have one writer
// each, and backward tiles add to dk and dv in the order of turns.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/backend.h"
#include "cpu/isa.h"
#include "cpu/work_list.h"

namespace splitkv::cpu {
namespace {

constexpr int64_t kAlignment = 64;  // bytes; one cache line and one AVX-512 vector

// Hands out aligned arrays from a thread's memory. With base = nullptr it only counts.
class Arena {
  public:
    explicit Arena(char* base) : base_(base) {}

    template <typename T>
    T* take(int64_t count) {
        char* start = base_ == nullptr ? nullptr : base_ + used_;
        used_ +=
            (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
        return reinterpret_cast<T*>(start);
    }
    int64_t used() const { return used_; }

  private:
    char* base_;
    int64_t used_ = 0;
};

int64_t padded_dim(int64_t dim) { return (dim + kDimPadding - 1) / kDimPadding * kDimPadding; }

// The padded width times an odd number of cache lines keeps rows apart in the cache sets.
int64_t stride_of_dims(int64_t head_dim_qk, int64_t head_dim_v) {
    return padded_dim(std::max(head_dim_qk, head_dim_v)) + kDimPadding;
}

TileScratch carve(Arena* arena, int64_t head_dim_qk, int64_t head_dim_v, bool is_backward) {
    TileScratch s{};
    s.dim_stride = stride_of_dims(head_dim_qk, head_dim_v);
    s.rows = arena->take<float>(kRowTile * s.dim_stride);
    s.q_t = arena->take<float>(head_dim_qk * kLaneStride);
    s.acc_t = arena->take<float>(std::max(head_dim_qk, head_dim_v) * kLaneStride);
    s.keys = arena->take<float>(kKeyTile * s.dim_stride);
    s.values = arena->take<float>(kKeyTile * s.dim_stride);
    s.probs_t = arena->take<float>(kKeyTile * kLaneStride);
    if (is_backward) {
        s.dout = arena->take<float>(kRowTile * s.dim_stride);
        s.dout_t = arena->take<float>(head_dim_v * kLaneStride);
        s.dprobs_t = arena->take<float>(kKeyTile * kLaneStride);
        s.dkeys = arena->take<float>(kKeyTile * s.dim_stride);
        s.dvalues = arena->take<float>(kKeyTile * s.dim_stride);
    }
    s.lane.begin = arena->take<int32_t>(kRowTile);
    s.lane.end = arena->take<int32_t>(kRowTile);
    s.lane.max = arena->take<float>(kRowTile);
    s.lane.sum = arena->take<float>(kRowTile);
    s.lane.factor = arena->take<float>(kRowTile);
    s.lane.lse = arena->take<float>(kRowTile);
    s.lane.delta = arena->take<float>(kRowTile);
    return s;
}

int64_t bytes_per_thread(int64_t head_dim_qk, int64_t head_dim_v, bool is_backward) {
    Arena arena(nullptr);
    carve(&arena, head_dim_qk, head_dim_v, is_backward);
    return arena.used();
}

char* align_up(void* memory) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
    return reinterpret_cast<char*>((address + kAlignment - 1) / kAlignment * kAlignment);
}

int clamp_threads(int32_t num_threads, int64_t num_items) {
    return static_cast<int>(std::clamp<int64_t>(num_items, 1, num_threads));
}

// Calls run(item, scratch) for every item, in ascending order of start, each on one thread.
template <typename Run>
void for_each_item(int64_t num_items, const Launch& launch, int64_t head_dim_qk, int64_t head_dim_v,
                   bool is_backward, const Run& run) {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> next_thread{0};
    const int64_t stride = bytes_per_thread(head_dim_qk, head_dim_v, is_backward);
    char* base = align_up(launch.workspace);
#pragma omp parallel num_threads(clamp_threads(launch.num_threads, num_items))
    {
        Arena arena(base + next_thread.fetch_add(1) * stride);
        const TileScratch scratch = carve(&arena, head_dim_qk, head_dim_v, is_backward);
        for (int64_t i = next.fetch_add(1); i < num_items; i = next.fetch_add(1)) run(i, scratch);
    }
}

int64_t workspace_bytes(int64_t head_dim_qk, int64_t head_dim_v, int32_t num_threads,
                        bool is_backward) {
    return bytes_per_thread(head_dim_qk, head_dim_v, is_backward) * num_threads + kAlignment;
}

float* float_at(const Rows& tensor, int64_t row, int64_t head) {
    return static_cast<float*>(tensor.data) + row * tensor.row_stride + head * tensor.head_stride;
}

const char* bytes_at(const Rows& tensor, int64_t row, int64_t head) {
    const int64_t element_bytes = tensor.dtype == DType::kFloat32 ? 4 : 2;
    return static_cast<const char*>(tensor.data) +
           (row * tensor.row_stride + head * tensor.head_stride) * element_bytes;
}

float scale_at(const Rows& scale, int64_t row, int64_t head) {
    return scale.data == nullptr ? 1.0f : *float_at(scale, row, head);
}

constexpr float kEmpty = -std::numeric_limits<float>::infinity();

// Weights are exp(lse_p - max) / sum instead of exp(lse_p - lse): lse itself is rounded, and at
// |lse| = 1e5 that alone would change the weights by 0.4 %. exps: memory for the partials' exps.
void merge_row_head(const MergeParams& params, const Isa& isa, int64_t row, int64_t head,
                    std::vector<float>* exps) {
    float* lse = float_at(params.lse, row, head);
    float* out = float_at(params.out, row, head);
    const int64_t num_values = params.out.dim;
    const int32_t* slots = params.part_slots + params.part_ptr[row];
    const int32_t num_slots = params.part_ptr[row + 1] - params.part_ptr[row];
    const float running_lse = params.accumulates ? *lse : kEmpty;
    float max = running_lse;
    for (int32_t i = 0; i < num_slots; ++i) {
        const float value = *float_at(params.part_lse, slots[i], head);
        // Not std::max, which drops NaN: beside empty partials the row would pass for empty.
        if (value > max || std::isnan(value)) max = value;
    }
    if (max == kEmpty) {
        std::fill(out, out + num_values, 0.0f);
        *lse = kEmpty;
        return;
    }
    // exp(-inf - max) = 0: an empty partial adds nothing to the sum, and its out isn't read below.
    const float running = std::exp(running_lse - max);
    float sum = running;
    exps->resize(static_cast<size_t>(num_slots));
    for (int32_t i = 0; i < num_slots; ++i) {
        const float value = std::exp(*float_at(params.part_lse, slots[i], head) - max);
        (*exps)[static_cast<size_t>(i)] = value;
        sum += value;
    }
    bool is_first = running_lse == kEmpty;
    if (!is_first) {
        isa.merge_row(out, DType::kFloat32, num_values, running / sum, true, out);
    }
    for (int32_t i = 0; i < num_slots; ++i) {
        if (*float_at(params.part_lse, slots[i], head) == kEmpty) continue;
        isa.merge_row(
            bytes_at(params.part_out, slots[i], head), params.part_out.dtype, num_values,
            (*exps)[static_cast<size_t>(i)] / sum * scale_at(params.part_scale, slots[i], head),
            is_first, out);
        is_first = false;
    }
    *lse = max + std::log(sum);
}

void add_row_head(const AddParams& params, const Isa& isa, int64_t row, int64_t head) {
    float* total = float_at(params.total, row, head);
    if (!params.accumulates) std::fill(total, total + params.total.dim, 0.0f);
    for (int32_t i = params.part_ptr[row]; i < params.part_ptr[row + 1]; ++i) {
        const int32_t slot = params.part_slots[i];
        isa.merge_row(bytes_at(params.parts, slot, head), params.parts.dtype, params.total.dim,
                      scale_at(params.part_scale, slot, head), false, total);
    }
}

}  // namespace

int64_t forward_workspace_bytes(int64_t head_dim_qk, int64_t head_dim_v, int32_t num_threads) {
    return workspace_bytes(head_dim_qk, head_dim_v, num_threads, false);
}

int64_t backward_workspace_bytes(int64_t head_dim_qk, int64_t head_dim_v, int32_t num_threads) {
    return workspace_bytes(head_dim_qk, head_dim_v, num_threads, true);
}

void forward(const ForwardParams& params) {
    const Isa& isa = current_isa();
    const WorkList work = build_work_list(params.q, params.k, params.kv_begin, params.kv_end);
    for_each_item(work.num_items(), params.launch, params.q.dim, params.v.dim, false,
                  [&](int64_t index, const TileScratch& scratch) {
                      isa.forward_tile(params, work.item(index), scratch);
                  });
}

void backward(const BackwardParams& params) {
    const Isa& isa = current_isa();
    const WorkList work = build_work_list(params.q, params.k, params.kv_begin, params.kv_end);
    std::vector<int32_t> turns(static_cast<size_t>(work.num_key_tiles * work.kv_heads), 0);
    for_each_item(work.num_items(), params.launch, params.q.dim, params.v.dim, true,
                  [&](int64_t index, const TileScratch& scratch) {
                      const RowTile tile = work.item(index);
                      isa.backward_tile(params, tile, scratch,
                                        turns.data() + tile.kv_head * work.num_key_tiles);
                  });
}

void merge(const MergeParams& params) {
    const Isa& isa = current_isa();
    const int64_t num_rows = params.out.rows;
#pragma omp parallel num_threads(clamp_threads(params.launch.num_threads, num_rows))
    {
        std::vector<float> exps;
#pragma omp for
        for (int64_t row = 0; row < num_rows; ++row) {
            for (int64_t head = 0; head < params.out.heads; ++head) {
                merge_row_head(params, isa, row, head, &exps);
            }
        }
    }
}

void add(const AddParams& params) {
    const Isa& isa = current_isa();
    const int64_t num_rows = params.total.rows;
#pragma omp parallel for num_threads(clamp_threads(params.launch.num_threads, num_rows))
    for (int64_t row = 0; row < num_rows; ++row) {
        for (int64_t head = 0; head < params.total.heads; ++head) {
            add_row_head(params, isa, row, head);
        }
    }
}

void encode(const EncodeParams& params) {
    const Isa& isa = current_isa();
    const Rows& encoded = params.encoded;
    const int64_t num_rows = encoded.rows;
#pragma omp parallel for num_threads(clamp_threads(params.launch.num_threads, num_rows))
    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t source = params.index == nullptr ? row : params.index[row];
        for (int64_t head = 0; head < params.values.heads; ++head) {
            uint16_t* target = static_cast<uint16_t*>(encoded.data) + row * encoded.row_stride +
                               head * encoded.head_stride;
            *float_at(params.scale, row, head) =
                isa.encode_row(float_at(params.values, source, head), params.values.dim, target);
            if (params.lse.data != nullptr) {
                *float_at(params.sent_lse, row, head) = *float_at(params.lse, source, head);
            }
        }
    }
}

void pack(const PackParams& params) {
#pragma omp parallel for num_threads(clamp_threads(params.launch.num_threads, params.num_rows))
    for (int64_t row = 0; row < params.num_rows; ++row) {
        const int64_t source_row = params.index == nullptr ? row : params.index[row];
        char* packed = params.packed + row * params.row_bytes;
        int64_t end = 0;  // of what is written
        for (int32_t i = 0; i < params.num_fields; ++i) {
            const PackField& field = params.fields[i];
            std::memset(packed + end, 0, static_cast<size_t>(field.begin - end));
            std::memcpy(packed + field.begin, field.source + source_row * field.row_stride,
                        static_cast<size_t>(field.end - field.begin));
            end = field.end;
        }
        std::memset(packed + end, 0, static_cast<size_t>(params.row_bytes - end));
    }
}

}  // namespace splitkv::cpu
