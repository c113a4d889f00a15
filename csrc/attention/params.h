// The arguments of the attention ops: plain pointers, sizes and strides, no torch.
// The Python op has checked and allocated everything that these structs point to.
#pragma once

#include <cstdint>

namespace splitkv {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

enum class Device : int32_t { kCpu = 0, kCuda = 1 };

// A tensor [rows, heads, dim] whose last dimension is contiguous.
// Strides are in elements and 64-bit: row * row_stride may pass 2^31 (packed batches do).
struct Rows {
    void* data;
    DType dtype;
    int64_t rows;
    int64_t heads;
    int64_t dim;
    int64_t row_stride;
    int64_t head_stride;
};

// Where and with what an op runs.
struct Launch {
    Device device;
    void* stream;             // cudaStream_t; nullptr on the CPU
    void* workspace;          // scratch memory, any alignment; nullptr when workspace_bytes is 0
    int64_t workspace_bytes;  // at least what the op's *_workspace_bytes function asked for
    int32_t num_threads;      // CPU threads to use, at least 1; unused on CUDA
    int32_t device_index;     // CUDA device; 0 on the CPU
};

// out, lse = attention of each query row over its own interval of the keys.
// Query head h reads KV head h / (q.heads / k.heads).
struct ForwardParams {
    Rows q;                   // [Tq, Hq, D]
    Rows k;                   // [Tk, Hkv, D], dtype of q
    Rows v;                   // [Tk, Hkv, Dv], dtype of q
    const int32_t* kv_begin;  // [Tq]
    const int32_t* kv_end;  // [Tq]; row i sees keys [kv_begin[i], kv_end[i]), none if begin >= end
    Rows out;               // [Tq, Hq, Dv], any dtype
    Rows lse;               // [Tq, Hq, 1], fp32, natural log; -inf for a row that sees no key
    float softmax_scale;
    Launch launch;
};

// Gradients of ForwardParams under the softmax of the merged result.
struct BackwardParams {
    Rows dout;                // [Tq, Hq, Dv], any dtype
    Rows q;                   // [Tq, Hq, D]
    Rows k;                   // [Tk, Hkv, D], dtype of q
    Rows v;                   // [Tk, Hkv, Dv], dtype of q
    Rows lse;                 // [Tq, Hq, 1], fp32, of the merged result
    Rows delta;               // [Tq, Hq, 1], fp32, rowsum(dout * out) of the merged result
    const int32_t* kv_begin;  // [Tq]
    const int32_t* kv_end;    // [Tq]
    Rows dq;                  // [Tq, Hq, D], fp32, every row is written
    Rows dk;                  // [Tk, Hkv, D], fp32, accumulated into
    Rows dv;                  // [Tk, Hkv, Dv], dtype of dk, accumulated into
    // CUDA alone: false says that dk and dv are overwritten; they may then have the dtype of q.
    bool accumulates;
    float softmax_scale;
    Launch launch;
};

// Joins the partials of each row to the running result in out and lse, in place.
struct MergeParams {
    Rows out;                   // [T, H, Dv], fp32; any dtype on CUDA without accumulates
    Rows lse;                   // [T, H, 1], fp32
    Rows part_out;              // [R, H, Dv], any dtype
    Rows part_lse;              // [R, H, 1], fp32
    Rows part_scale;            // [R, H, 1], fp32, factor of part_out; data is nullptr for 1
    const int32_t* part_ptr;    // [T + 1], row t merges part_slots[part_ptr[t] .. part_ptr[t + 1])
    const int32_t* part_slots;  // [num_slots], rows of part_out
    int64_t num_slots;
    bool accumulates;  // false: there is no running result, out and lse are overwritten
    Launch launch;
};

// total[t] += scale * part for each partial of row t, in the order of its slots.
struct AddParams {
    Rows total;                 // [T, H, D], fp32; any dtype on CUDA without accumulates
    Rows parts;                 // [R, H, D], any dtype
    Rows part_scale;            // [R, H, 1], fp32; data is nullptr for 1
    const int32_t* part_ptr;    // [T + 1], as in MergeParams
    const int32_t* part_slots;  // [num_slots], rows of parts
    int64_t num_slots;
    bool accumulates;  // false: total starts from 0 and is overwritten
    Launch launch;
};

// Row i is that of values[index[i]]: encoded = values / scale, where scale is the largest magnitude
// of each (row, head); 0 where it is
// 0.
struct EncodeParams {
    Rows values;           // [T, H, D], fp32
    const int64_t* index;  // [R]; nullptr takes all rows in their order, R = T
    Rows encoded;          // [R, H, D], fp16
    Rows scale;            // [R, H, 1], fp32
    Rows lse;              // [T, H, 1], fp32; data is nullptr where the values have none
    Rows sent_lse;         // [R, H, 1], fp32, of the chosen rows
    Launch launch;
};

// Rows of several tensors side by side: the bytes of a field in packed row i are those of row
// index[i] of its source. Bytes of no field are cleared.
struct PackField {
    const char* source;  // row 0
    int64_t row_stride;  // bytes from row to row of the source
    int64_t begin;       // where the field lies in a packed row, in bytes; fields ascend
    int64_t end;
};

constexpr int kMaxPackFields = 8;

struct PackParams {
    char* packed;  // [num_rows, row_bytes]
    int64_t num_rows;
    int64_t row_bytes;
    const int64_t* index;  // [num_rows]; nullptr takes all rows in their order
    PackField fields[kMaxPackFields];
    int32_t num_fields;
    Launch launch;
};

}  // namespace splitkv
