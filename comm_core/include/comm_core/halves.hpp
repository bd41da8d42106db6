// What callers ask of 16-bit elements beside fp32 ones that stand for the same numbers.
#pragma once

#include "comm_core/types.hpp"

namespace [[gnu::visibility("default")]] comm_core {

/// Whether some element of `halves`, widened, is another number than that of `wide`, as if one of them was written to.
/// A NaN differs from everything. float16 or bfloat16 beside float32, in host memory, equally many; else InvalidUsage.
bool differ(const Buffer& halves, const Buffer& wide);

}  // namespace comm_core
