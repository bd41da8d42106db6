// Copies that callers of collectives need on their way to a buffer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm_core/types.hpp"

namespace [[gnu::visibility("default")]] comm_core {

/// target[i] = source[i] + 0.0 for `count` elements of a floating-point `dtype` (else InvalidUsage): a copy in which
/// -0.0 becomes +0.0, every other number stays what it is, and a NaN a NaN. Host memory, aligned to its elements; the
/// same one, or two that do not overlap. A large target is written past the caches: whoever sends it later reads it
/// from memory anyway, and what the caller computes with stays in them.
void copy_plus_zero(DType dtype, std::byte* target, const std::byte* source, std::int64_t count);

}  // namespace comm_core
