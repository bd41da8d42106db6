#include "comm_core/copies.hpp"

#include <string>

#include "comm_core/errors.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace comm_core {
namespace {

float plus_zero(float value) { return value + 0.0F; }
double plus_zero(double value) { return value + 0.0; }
/// fp16 and bf16 have their sign in the same place.
std::uint16_t plus_zero(std::uint16_t bits) { return bits == 0x8000U ? std::uint16_t{0} : bits; }

template <class T>
void copy_each(T* target, const T* source, std::int64_t count) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) target[i] = plus_zero(source[i]);
}

#if defined(__x86_64__)

constexpr std::size_t kLine = 64;                    // of a cache, which a streaming store fills as a whole
constexpr std::int64_t kStreamedBytes = 128 * 1024;  // from here on, a quarter of a common second-level cache

__m128 load_plus_zero(const float* from) { return _mm_add_ps(_mm_loadu_ps(from), _mm_setzero_ps()); }
__m128d load_plus_zero(const double* from) { return _mm_add_pd(_mm_loadu_pd(from), _mm_setzero_pd()); }
__m128i load_plus_zero(const std::uint16_t* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m128i marks = _mm_cmpeq_epi16(bits, _mm_set1_epi16(static_cast<short>(0x8000)));
  return _mm_andnot_si128(marks, bits);
}

void stream(float* to, __m128 values) { _mm_stream_ps(to, values); }
void stream(double* to, __m128d values) { _mm_stream_pd(to, values); }
void stream(std::uint16_t* to, __m128i values) { _mm_stream_si128(reinterpret_cast<__m128i*>(to), values); }

template <class T>
void copy(T* target, const T* source, std::int64_t count) {
  constexpr auto kPerLine = static_cast<std::int64_t>(kLine / sizeof(T));
  constexpr auto kPerStore = static_cast<std::int64_t>(sizeof(__m128) / sizeof(T));
  const std::size_t beyond = reinterpret_cast<std::uintptr_t>(target) % kLine;
  if (count * static_cast<std::int64_t>(sizeof(T)) < kStreamedBytes || beyond % sizeof(T) != 0) {
    return copy_each(target, source, count);
  }
  std::int64_t i = static_cast<std::int64_t>((kLine - beyond) % kLine / sizeof(T));
  copy_each(target, source, i);
  for (; i + kPerLine <= count; i += kPerLine) {
    for (std::int64_t j = i; j < i + kPerLine; j += kPerStore) stream(target + j, load_plus_zero(source + j));
  }
  _mm_sfence();  // before anybody is told that it is there
  copy_each(target + i, source + i, count - i);
}

#else

template <class T>
void copy(T* target, const T* source, std::int64_t count) {
  copy_each(target, source, count);
}

#endif

template <class T>
void copy_as(std::byte* target, const std::byte* source, std::int64_t count) {
  copy(reinterpret_cast<T*>(target), reinterpret_cast<const T*>(source), count);
}

}  // namespace

void copy_plus_zero(DType dtype, std::byte* target, const std::byte* source, std::int64_t count) {
  switch (dtype) {
    case DType::kFloat32:
      return copy_as<float>(target, source, count);
    case DType::kFloat64:
      return copy_as<double>(target, source, count);
    case DType::kFloat16:
    case DType::kBFloat16:
      return copy_as<std::uint16_t>(target, source, count);
    default:
      throw InvalidUsage("copy_plus_zero: expected a floating-point type, got " + std::string(name_of(dtype)));
  }
}

}  // namespace comm_core
