// Numbers in 8 or 4 bits, with a scale for each block of 128.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm_core/types.hpp"

namespace [[gnu::visibility("default")]] comm_core {

/// How many bytes `count` numbers become, a multiple of 4: a scale of fp32 for each block, then the codes. `bits` is 8
/// or 4 (else InvalidUsage).
std::int64_t blockwise_bytes(std::int64_t count, int bits);

/// Of each block the scale is its largest magnitude over 127 or 7, and a number's code the nearest whole multiple of
/// it, of two the even one. In 4 bits codes are 8 larger, two in a byte, the first one below. A block with a NaN or an
/// infinity comes back as NaN. `dtype` is float32 or float64 (else InvalidUsage). Host memory.
void encode_blockwise(DType dtype, std::byte* wire, const std::byte* values, std::int64_t count, int bits);

/// The inverse: codes times scales.
void decode_blockwise(DType dtype, std::byte* values, const std::byte* wire, std::int64_t count, int bits);

}  // namespace comm_core
