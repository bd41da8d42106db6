#include "layout.hpp"

#include <numeric>

namespace comm_core {

CountList balanced_counts(std::int64_t count, int size) {
  CountList counts(static_cast<std::size_t>(size), count / size);
  for (std::int64_t r = 0; r < count % size; ++r) ++counts[static_cast<std::size_t>(r)];
  return counts;
}

CountList offsets_of(const CountList& counts) {
  CountList offsets(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), offsets.begin() + 1);
  return offsets;
}

}  // namespace comm_core
