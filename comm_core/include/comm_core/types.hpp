// Element types, reduction operators and non-owning views of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

namespace [[gnu::visibility("default")]] comm_core {

enum class DType { kFloat16, kBFloat16, kFloat32, kFloat64, kInt8, kInt16, kInt32, kInt64, kUInt8, kBool };
enum class ReduceOp { kSum, kAvg, kMin, kMax, kProd };

/// Bytes of one element.
std::size_t item_size(DType dtype) noexcept;
std::string_view name_of(DType dtype) noexcept;
std::string_view name_of(ReduceOp op) noexcept;

/// True for fp16 and bf16, whose sums are accumulated in fp32 and rounded once.
bool is_half(DType dtype) noexcept;
bool is_floating(DType dtype) noexcept;
/// Everything but AVG of a type that is not floating point.
bool is_supported(DType dtype, ReduceOp op) noexcept;

/// Whatever keeps a caller's memory alive; released when the engine is done with it.
using KeepAlive = std::shared_ptr<void>;

/// Contiguous elements that somebody else owns, in host memory or on a device.
struct Buffer {
  std::byte* data = nullptr;
  std::int64_t count = 0;
  DType dtype = DType::kUInt8;
  bool readonly = false;
  std::optional<int> device = std::nullopt;  ///< number of the CUDA device; none: host memory
  std::uintptr_t stream = 0;                 ///< device memory is ready when what this stream has been given is done

  std::int64_t bytes() const noexcept { return count * static_cast<std::int64_t>(item_size(dtype)); }
  const std::byte* end() const noexcept { return data + bytes(); }
};

}  // namespace comm_core
