#include "comm_core/types.hpp"

namespace comm_core {

std::size_t item_size(DType dtype) noexcept {
  switch (dtype) {
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kBool:
      return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
  }
  __builtin_unreachable();
}

std::string_view name_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kInt8:
      return "int8";
    case DType::kInt16:
      return "int16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kUInt8:
      return "uint8";
    case DType::kBool:
      return "bool";
  }
  __builtin_unreachable();
}

std::string_view name_of(ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kProd:
      return "prod";
  }
  __builtin_unreachable();
}

bool is_half(DType dtype) noexcept { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

bool is_floating(DType dtype) noexcept {
  return is_half(dtype) || dtype == DType::kFloat32 || dtype == DType::kFloat64;
}

bool is_supported(DType dtype, ReduceOp op) noexcept { return op != ReduceOp::kAvg || is_floating(dtype); }

}  // namespace comm_core
