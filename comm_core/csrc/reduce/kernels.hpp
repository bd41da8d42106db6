// Elementwise reductions over untyped memory. The pairs of dtype and operator were checked before (is_supported).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm_core/types.hpp"

namespace comm_core {

/// out = a op b; out may be a or b. AVG only adds here. Not for the 16-bit floating types, whose partial sums would
/// round at every hop.
void combine(DType dtype, ReduceOp op, std::byte* out, const std::byte* a, const std::byte* b, std::int64_t count);

/// The last combination of `ranks` contributions: like combine, and AVG also divides, in the same pass.
void combine_last(DType dtype, ReduceOp op, std::byte* out, const std::byte* a, const std::byte* b, std::int64_t count,
                  int ranks);

/// out = sources[0] op sources[1] op ..., in this order, any dtype; 16-bit floats are accumulated in fp32 and rounded
/// once. AVG divides by the number of sources. `out` may be one of the sources.
void combine_all(DType dtype, ReduceOp op, std::byte* out, const std::vector<const std::byte*>& sources,
                 std::int64_t count);

}  // namespace comm_core
