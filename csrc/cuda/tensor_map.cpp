#include "cuda/tensor_map.h"

#include "cuda/launch.h"
#include "cuda/operand.h"

namespace splitkv::cuda {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Taken from the driver at run time: linking libcuda would keep the module from loading without it.
EncodeTiled encode_tiled() {
    static const EncodeTiled function = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult result{};
        constexpr unsigned int kFirstVersion =
            12000;  // the driver API that introduced the function
        SPLITKV_CUDA_CHECK(cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &entry, kFirstVersion, cudaEnableDefault, &result));
        SPLITKV_CHECK(
            result == cudaDriverEntryPointSuccess && entry != nullptr,
            "the CUDA driver has no cuTensorMapEncodeTiled; needs one of CUDA 12 or later");
        return reinterpret_cast<EncodeTiled>(entry);
    }();
    return function;
}

CUtensorMapDataType map_type(DType dtype) {
    switch (dtype) {
        case DType::kBFloat16:
            return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
        case DType::kFloat16:
            return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
        default:
            return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    }
}

}  // namespace

CUtensorMap make_tensor_map(const char* name, const Rows& tensor, const TensorMapBox& box) {
    CUtensorMap map{};
    if (tensor.rows == 0 || tensor.heads == 0) return map;
    check_operand(name, tensor);
    const int64_t element_bytes = tensor.dtype == DType::kFloat32 ? 4 : 2;
    // Torch gives any stride to a dimension of size 1; it is never used.
    const int64_t head_bytes =
        tensor.heads == 1 ? kAlignmentBytes : tensor.head_stride * element_bytes;
    const int64_t row_bytes =
        tensor.rows == 1 ? kAlignmentBytes : tensor.row_stride * element_bytes;
    const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(tensor.dim),
                                 static_cast<cuuint64_t>(tensor.heads),
                                 static_cast<cuuint64_t>(tensor.rows)};
    const cuuint64_t strides[2] = {static_cast<cuuint64_t>(head_bytes),
                                   static_cast<cuuint64_t>(row_bytes)};
    const cuuint32_t box_sizes[3] = {static_cast<cuuint32_t>(box.column_bytes / element_bytes),
                                     static_cast<cuuint32_t>(box.heads),
                                     static_cast<cuuint32_t>(box.rows)};
    const cuuint32_t element_strides[3] = {1, 1, 1};
    const CUtensorMapDataType type = map_type(tensor.dtype);
    const CUtensorMapSwizzle swizzle =
        box.column_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
    const CUresult status =
        encode_tiled()(&map, type, 3, tensor.data, sizes, strides, box_sizes, element_strides,
                       CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    SPLITKV_CHECK(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with code ",
                  static_cast<int>(status), " for ", name, " of shape [", tensor.rows, ", ",
                  tensor.heads, ", ", tensor.dim, "], box [", box.rows, ", ", box.heads, "]");
    return map;
}

}  // namespace splitkv::cuda
