#include "half.hpp"

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
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  return i;
}

#else

bool converts() { return false; }
std::int64_t widen_eights(const std::uint16_t*, float*, std::int64_t) { return 0; }
std::int64_t narrow_eights(const float*, std::uint16_t*, std::int64_t) { return 0; }

#endif

}  // namespace

void widen_half(DType dtype, const std::byte* from, float* to, std::int64_t count) {
  const auto* const halves = reinterpret_cast<const std::uint16_t*>(from);
  if (dtype == DType::kBFloat16) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = bfloat16_to_float(halves[i]);
    return;
  }
  for (std::int64_t i = converts() ? widen_eights(halves, to, count) : 0; i < count; ++i) {
    to[i] = float16_to_float(halves[i]);
  }
}

void narrow_half(DType dtype, const float* from, std::byte* to, std::int64_t count) {
  auto* const halves = reinterpret_cast<std::uint16_t*>(to);
  if (dtype == DType::kBFloat16) {
    for (std::int64_t i = 0; i < count; ++i) halves[i] = float_to_bfloat16(from[i]);
    return;
  }
  for (std::int64_t i = converts() ? narrow_eights(from, halves, count) : 0; i < count; ++i) {
    halves[i] = float_to_float16(from[i]);
  }
}

}  // namespace comm_core
