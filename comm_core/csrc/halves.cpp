#include "comm_core/halves.hpp"

#include <string>

#include "comm_core/errors.hpp"
#include "reduce/half.hpp"

namespace comm_core {

bool differ(const Buffer& halves, const Buffer& wide) {
  if (!is_half(halves.dtype) || wide.dtype != DType::kFloat32 || halves.count != wide.count) {
    throw InvalidUsage("differ: expected float16 or bfloat16 and as many float32, got " + std::to_string(halves.count) +
                       " of " + std::string(name_of(halves.dtype)) + " and " + std::to_string(wide.count) + " of " +
                       std::string(name_of(wide.dtype)));
  }
  if (halves.device || wide.device) throw InvalidUsage("differ: both have to be in host memory");
  return halves_differ(halves.dtype, halves.data, reinterpret_cast<const float*>(wide.data), halves.count);
}

}  // namespace comm_core
