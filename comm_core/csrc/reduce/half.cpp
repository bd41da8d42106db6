#include "half.hpp"

#include <algorithm>
#include <array>

#include "vectorised.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace comm_core {
namespace {

#if defined(__x86_64__)

/// Whether the processor converts fp16 itself.
bool converts() {
  static const bool answer = __builtin_cpu_supports("avx") != 0 && __builtin_cpu_supports("f16c") != 0;
  return answer;
}

/// Eight at a time; returns how many were converted.
__attribute__((target("avx,f16c"))) std::int64_t widen_eights(const std::uint16_t* from, float* to,
                                                              std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  return i;
}

__attribute__((target("avx,f16c"))) std::int64_t narrow_eights(const float* from, std::uint16_t* to,
                                                               std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 wide = _mm256_loadu_ps(from + i);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT));
  }
  return i;
}

#else

bool converts() { return false; }
std::int64_t widen_eights(const std::uint16_t*, float*, std::int64_t) { return 0; }
std::int64_t narrow_eights(const float*, std::uint16_t*, std::int64_t) { return 0; }

#endif

COMM_CORE_VECTORISED void widen_brain(const std::uint16_t* from, float* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = bfloat16_to_float(from[i]);
}

COMM_CORE_VECTORISED void narrow_brain(const float* from, std::uint16_t* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = float_to_bfloat16(from[i]);
}

COMM_CORE_VECTORISED bool brain_differs(const std::uint16_t* halves, const float* wide, std::int64_t count) {
  std::uint32_t different = 0;
  for (std::int64_t i = 0; i < count; ++i) different |= bfloat16_to_float(halves[i]) != wide[i] ? 1U : 0U;
  return different != 0;
}

COMM_CORE_VECTORISED bool floats_differ(const float* some, const float* others, std::int64_t count) {
  std::uint32_t different = 0;
  for (std::int64_t i = 0; i < count; ++i) different |= some[i] != others[i] ? 1U : 0U;
  return different != 0;
}

constexpr std::int64_t kBlock = 4096;  // elements that are looked at before a difference ends the search

}  // namespace

void widen_half(DType dtype, const std::byte* from, float* to, std::int64_t count) {
  const auto* const halves = reinterpret_cast<const std::uint16_t*>(from);
  if (dtype == DType::kBFloat16) return widen_brain(halves, to, count);
  for (std::int64_t i = converts() ? widen_eights(halves, to, count) : 0; i < count; ++i) {
    to[i] = float16_to_float(halves[i]);
  }
}

void narrow_half(DType dtype, const float* from, std::byte* to, std::int64_t count) {
  auto* const halves = reinterpret_cast<std::uint16_t*>(to);
  if (dtype == DType::kBFloat16) return narrow_brain(from, halves, count);
  for (std::int64_t i = converts() ? narrow_eights(from, halves, count) : 0; i < count; ++i) {
    halves[i] = float_to_float16(from[i]);
  }
}

bool halves_differ(DType dtype, const std::byte* halves, const float* wide, std::int64_t count) {
  std::array<float, kBlock> block;
  for (std::int64_t first = 0; first < count; first += kBlock) {
    const auto n = std::min(kBlock, count - first);
    if (dtype == DType::kBFloat16) {
      if (brain_differs(reinterpret_cast<const std::uint16_t*>(halves) + first, wide + first, n)) return true;
      continue;
    }
    widen_half(dtype, halves + 2 * first, block.data(), n);
    if (floats_differ(block.data(), wide + first, n)) return true;
  }
  return false;
}

}  // namespace comm_core
