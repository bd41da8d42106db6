// How elements are dealt out to ranks. Pure.
#pragma once

#include <cstdint>
#include <vector>

namespace comm_core {

using CountList = std::vector<std::int64_t>;

/// The first (count % size) ranks get one element more than the others.
CountList balanced_counts(std::int64_t count, int size);
/// Where each chunk begins; one entry more than counts, the last being the sum.
CountList offsets_of(const CountList& counts);

}  // namespace comm_core
