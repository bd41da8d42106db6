#include "comm_core/blockwise.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#include "comm_core/errors.hpp"
#include "reduce/vectorised.hpp"

namespace comm_core {
namespace {

constexpr std::int64_t kBlock = 128;
constexpr std::int64_t kScaleBytes = sizeof(float);

template <int bits>
constexpr int kLevels = (1 << (bits - 1)) - 1;
template <int bits>
constexpr std::int64_t kBlockBytes = kBlock * bits / 8;

std::int64_t blocks_of(std::int64_t count) { return (count + kBlock - 1) / kBlock; }
std::int64_t code_bytes(std::int64_t count, int bits) { return (count * bits + 7) / 8; }

/// The largest magnitude of a block. As integers, magnitudes are in the same order, and a NaN is above all: so the
/// compiler may take several at a time.
template <class T>
inline __attribute__((always_inline)) T largest(const T* values) {
  using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
  constexpr Bits kMagnitude = ~Bits{0} >> 1;
  Bits most = 0;
  for (std::int64_t i = 0; i < kBlock; ++i) most = std::max(most, std::bit_cast<Bits>(values[i]) & kMagnitude);
  return std::bit_cast<T>(most);
}

/// A small number added to this lies in its last bits, rounded to a whole one, of two to the even one. Comparisons of
/// floating-point numbers may trap, which keeps a compiler from taking several at a time: so limits are those of
/// integers.
template <class T>
constexpr T kRounder = sizeof(T) == 8 ? T(6755399441055744.0) : T(12582912.0);

template <class T>
inline __attribute__((always_inline)) std::int32_t rounded(T small) {
  using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
  return static_cast<std::int32_t>(std::bit_cast<Bits>(small + kRounder<T>) - std::bit_cast<Bits>(kRounder<T>));
}

template <class T, int bits>
inline __attribute__((always_inline)) void encode_block(const T* values, float* scale, std::uint8_t* bytes) {
  constexpr std::int32_t kMost = kLevels<bits>;
  const auto finest = static_cast<float>(largest(values) / kMost);
  *scale = std::isfinite(finest) ? finest : std::numeric_limits<float>::quiet_NaN();
  const T unit = *scale > 0 ? static_cast<T>(*scale) : T(1);
  std::array<std::int8_t, kBlock> codes;
  for (std::int64_t i = 0; i < kBlock; ++i) {
    codes[i] = static_cast<std::int8_t>(std::min(std::max(rounded(values[i] / unit), -kMost), kMost));
  }
  if constexpr (bits == 8) {
    std::memcpy(bytes, codes.data(), kBlock);
  } else {
    for (std::int64_t i = 0; i < kBlockBytes<bits>; ++i) {
      bytes[i] = static_cast<std::uint8_t>((codes[2 * i] + 8) | (codes[2 * i + 1] + 8) << 4);
    }
  }
}

template <class T, int bits>
inline __attribute__((always_inline)) void decode_block(T* values, float scale, const std::uint8_t* bytes) {
  std::array<std::int8_t, kBlock> codes;
  if constexpr (bits == 8) {
    std::memcpy(codes.data(), bytes, kBlock);
  } else {
    for (std::int64_t i = 0; i < kBlockBytes<bits>; ++i) {
      codes[2 * i] = static_cast<std::int8_t>((bytes[i] & 15) - 8);
      codes[2 * i + 1] = static_cast<std::int8_t>((bytes[i] >> 4) - 8);
    }
  }
  const T unit = static_cast<T>(scale);
  for (std::int64_t i = 0; i < kBlock; ++i) values[i] = static_cast<T>(codes[i]) * unit;
}

template <class T, int bits>
COMM_CORE_VECTORISED void encode_whole(std::byte* scales, std::uint8_t* bytes, const T* values, std::int64_t blocks) {
  for (std::int64_t block = 0; block < blocks; ++block) {
    float scale;
    encode_block<T, bits>(values + block * kBlock, &scale, bytes + block * kBlockBytes<bits>);
    std::memcpy(scales + block * kScaleBytes, &scale, kScaleBytes);
  }
}

template <class T, int bits>
COMM_CORE_VECTORISED void decode_whole(T* values, const std::byte* scales, const std::uint8_t* bytes,
                                       std::int64_t blocks) {
  for (std::int64_t block = 0; block < blocks; ++block) {
    float scale;
    std::memcpy(&scale, scales + block * kScaleBytes, kScaleBytes);
    decode_block<T, bits>(values + block * kBlock, scale, bytes + block * kBlockBytes<bits>);
  }
}

template <class T, int bits>
void encode(std::byte* wire, const T* values, std::int64_t count) {
  const std::int64_t whole = count / kBlock, rest = count % kBlock, head = blocks_of(count) * kScaleBytes;
  auto* const bytes = reinterpret_cast<std::uint8_t*>(wire + head);
  encode_whole<T, bits>(wire, bytes, values, whole);
  std::int64_t written = whole * kBlockBytes<bits>;
  if (rest > 0) {
    std::array<T, kBlock> last{};
    std::array<std::uint8_t, kBlockBytes<bits>> codes;
    std::copy_n(values + whole * kBlock, rest, last.begin());
    encode_whole<T, bits>(wire + whole * kScaleBytes, codes.data(), last.data(), 1);
    std::copy_n(codes.begin(), code_bytes(rest, bits), bytes + written);
    written += code_bytes(rest, bits);
  }
  std::fill(bytes + written, reinterpret_cast<std::uint8_t*>(wire) + blockwise_bytes(count, bits), std::uint8_t{0});
}

template <class T, int bits>
void decode(T* values, const std::byte* wire, std::int64_t count) {
  const std::int64_t whole = count / kBlock, rest = count % kBlock, head = blocks_of(count) * kScaleBytes;
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(wire + head);
  decode_whole<T, bits>(values, wire, bytes, whole);
  if (rest > 0) {
    std::array<T, kBlock> last;
    std::array<std::uint8_t, kBlockBytes<bits>> codes{};
    std::copy_n(bytes + whole * kBlockBytes<bits>, code_bytes(rest, bits), codes.begin());
    decode_whole<T, bits>(last.data(), wire + whole * kScaleBytes, codes.data(), 1);
    std::copy_n(last.begin(), rest, values + whole * kBlock);
  }
}

/// Calls visit(T{}, bits) with the type of elements and the number of bits that are meant.
template <class Visit>
void dispatch(DType dtype, int bits, Visit visit) {
  const auto of = [&](auto zero) {
    if (bits == 4) return visit(zero, std::integral_constant<int, 4>{});
    if (bits == 8) return visit(zero, std::integral_constant<int, 8>{});
    throw InvalidUsage("blockwise: expected 8 or 4 bits, got " + std::to_string(bits));
  };
  if (dtype == DType::kFloat32) return of(float{});
  if (dtype == DType::kFloat64) return of(double{});
  throw InvalidUsage("blockwise: expected float32 or float64, got " + std::string(name_of(dtype)));
}

}  // namespace

std::int64_t blockwise_bytes(std::int64_t count, int bits) {
  if (bits != 4 && bits != 8) throw InvalidUsage("blockwise: expected 8 or 4 bits, got " + std::to_string(bits));
  return blocks_of(count) * kScaleBytes + (code_bytes(count, bits) + 3) / 4 * 4;
}

void encode_blockwise(DType dtype, std::byte* wire, const std::byte* values, std::int64_t count, int bits) {
  dispatch(dtype, bits, [&](auto zero, auto width) {
    using T = decltype(zero);
    encode<T, decltype(width)::value>(wire, reinterpret_cast<const T*>(values), count);
  });
}

void decode_blockwise(DType dtype, std::byte* values, const std::byte* wire, std::int64_t count, int bits) {
  dispatch(dtype, bits, [&](auto zero, auto width) {
    using T = decltype(zero);
    decode<T, decltype(width)::value>(reinterpret_cast<T*>(values), wire, count);
  });
}

}  // namespace comm_core
