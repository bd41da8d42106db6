// Samples of memory: what some elements were, and whether they still are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace [[gnu::visibility("default")]] comm_core {

/// kept[i] = source[places[i]], of elements of `itemsize` bytes. Host memory.
void take_samples(std::byte* kept, const std::byte* source, std::span<const std::int64_t> places, std::size_t itemsize);

/// The first i where source[places[i]] has other bytes than kept[i]; -1 where there is none.
std::int64_t changed_sample(const std::byte* kept, const std::byte* source, std::span<const std::int64_t> places,
                            std::size_t itemsize);

}  // namespace comm_core
