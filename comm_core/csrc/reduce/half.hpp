// Conversions between the 16-bit floating types and fp32.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "comm_core/types.hpp"

namespace comm_core {

/// `count` elements of fp16 or bf16 as fp32, and back, rounded to nearest even. By hardware where it can.
void widen_half(DType dtype, const std::byte* from, float* to, std::int64_t count);
void narrow_half(DType dtype, const float* from, std::byte* to, std::int64_t count);
/// Whether some element of `halves`, widened, is another number than that of `wide`. A NaN is, beside anything.
bool halves_differ(DType dtype, const std::byte* halves, const float* wide, std::int64_t count);

// - One element; branch-free, so that compilers vectorise the loops over them

inline float bfloat16_to_float(std::uint16_t h) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(h) << 16);
}

/// Rounds to nearest even; every NaN becomes a quiet NaN.
inline std::uint16_t float_to_bfloat16(float f) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(f);
  const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x0040U;
  return static_cast<std::uint16_t>((bits & 0x7fffffffU) > 0x7f800000U ? quiet : rounded);
}

inline float float16_to_float(std::uint16_t h) noexcept {
  const std::uint32_t sign = (static_cast<std::uint32_t>(h) & 0x8000U) << 16;
  const std::uint32_t magnitude = h & 0x7fffU;
  // Exponent and mantissa moved into fp32's place. A normal number's bias goes from 15 to 127; a subnormal one's
  // mantissa is put below a leading one, which is then taken away. No operand is subnormal in fp32, as threads that
  // flush those to zero (torch.set_flush_denormal) get the same numbers. Infinity and NaN have an exponent of all ones.
  const std::uint32_t moved = magnitude << 13;
  const std::uint32_t normal = moved + 0x38000000U;
  const std::uint32_t tiny =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(moved + 0x38800000U) - std::bit_cast<float>(0x38800000U));
  const std::uint32_t special = moved | 0x7f800000U;
  const std::uint32_t finite = magnitude < 0x0400U ? tiny : normal;
  return std::bit_cast<float>(sign | (magnitude >= 0x7c00U ? special : finite));
}

/// Rounds to nearest even; overflow gives infinity, every NaN a quiet NaN.
inline std::uint16_t float_to_float16(float f) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(f);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  // Subnormal results: adding 0.5 aligns the mantissa so that the hardware's own rounding does the work.
  const std::uint32_t tiny =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - std::bit_cast<std::uint32_t>(0.5F);
  const std::uint32_t normal = (magnitude - 0x38000000U + 0x0fffU + ((magnitude >> 13) & 1U)) >> 13;
  const std::uint32_t finite = magnitude < 0x38800000U ? tiny : normal;
  const std::uint32_t large = magnitude > 0x7f800000U ? 0x7e00U : 0x7c00U;
  return static_cast<std::uint16_t>(sign | (magnitude >= 0x477ff000U ? large : finite));
}

}  // namespace comm_core
