// IEEE half precision, converted by arithmetic.
#pragma once

#include <cmath>
#include <cstdint>

struct __half {
  std::uint16_t bits;
};

inline float __half2float(__half x) {
  const int exponent = (x.bits >> 10) & 31, fraction = x.bits & 1023;
  const float size = exponent == 31  ? (fraction != 0 ? NAN : INFINITY)
                     : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                     : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return (x.bits >> 15) != 0 ? -size : size;
}

inline __half __float2half_rn(float x) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(x) ? 0x8000 : 0);
  const auto signed_bits = [sign](int bits) { return __half{static_cast<std::uint16_t>(sign | bits)}; };
  if (std::isnan(x)) return signed_bits(0x7fff);
  const double size = std::fabs(static_cast<double>(x));
  if (size >= 65520) return signed_bits(0x7c00);
  if (size == 0) return signed_bits(0);
  int exponent = std::max(std::ilogb(size), -14);
  int units = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));  // ties to even
  if (units == 2048) units = 1024, ++exponent;
  return signed_bits(units < 1024 ? units : ((exponent + 15) << 10) + units - 1024);
}
