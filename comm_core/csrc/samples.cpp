#include "comm_core/samples.hpp"

#include <cstring>

namespace comm_core {

void take_samples(std::byte* kept, const std::byte* source, std::span<const std::int64_t> places,
                  std::size_t itemsize) {
  for (std::size_t i = 0; i < places.size(); ++i) {
    std::memcpy(kept + i * itemsize, source + static_cast<std::size_t>(places[i]) * itemsize, itemsize);
  }
}

std::int64_t changed_sample(const std::byte* kept, const std::byte* source, std::span<const std::int64_t> places,
                            std::size_t itemsize) {
  for (std::size_t i = 0; i < places.size(); ++i) {
    const std::byte* const now = source + static_cast<std::size_t>(places[i]) * itemsize;
    if (std::memcmp(kept + i * itemsize, now, itemsize) != 0) return static_cast<std::int64_t>(i);
  }
  return -1;
}

}  // namespace comm_core
