#include "comm_core/copies.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace comm_core {
namespace {

void copy(std::byte* target, const std::byte* source, std::int64_t nbytes) {
  std::memcpy(target, source, static_cast<std::size_t>(nbytes));
}

}  // namespace

#if defined(__x86_64__)

void copy_past_caches(std::byte* target, const std::byte* source, std::int64_t nbytes) {
  constexpr std::int64_t kLine = 64;              // of a cache, which streaming stores fill as a whole
  constexpr std::int64_t kStreamed = 128 * 1024;  // from here on, a quarter of a common second-level cache
  constexpr std::int64_t kStore = sizeof(__m128i);
  if (target == source) return;
  if (nbytes < kStreamed) return copy(target, source, nbytes);
  const auto beyond = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(target) % kLine);
  std::int64_t i = (kLine - beyond) % kLine;
  copy(target, source, i);
  for (; i + kLine <= nbytes; i += kLine) {
    for (std::int64_t j = i; j < i + kLine; j += kStore) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + j));
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + j), bytes);
    }
  }
  _mm_sfence();  // before anybody is told that it is there
  copy(target + i, source + i, nbytes - i);
}

#else

void copy_past_caches(std::byte* target, const std::byte* source, std::int64_t nbytes) {
  if (target != source) copy(target, source, nbytes);
}

#endif

}  // namespace comm_core
