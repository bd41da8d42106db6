// Copies that callers of collectives need on their way to a buffer.
#pragma once

#include <cstddef>
#include <cstdint>

namespace [[gnu::visibility("default")]] comm_core {

/// Copies `nbytes` of host memory; both places are the same, or do not overlap. A large target is written past the
/// caches: whoever sends it later reads it from memory anyway, and what the caller computes with stays in them.
void copy_past_caches(std::byte* target, const std::byte* source, std::int64_t nbytes);

}  // namespace comm_core
