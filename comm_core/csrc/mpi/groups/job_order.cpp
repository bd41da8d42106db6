#include "job_order.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "../check.hpp"

namespace comm_core {

std::vector<int> in_job_order(MPI_Comm comm) {
  int size = 0;
  check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  MPI_Group group = MPI_GROUP_NULL, world = MPI_GROUP_NULL;
  check(MPI_Comm_group(comm, &group), "MPI_Comm_group");
  check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  std::vector<int> ranks(static_cast<std::size_t>(size)), places(ranks.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  const int code = MPI_Group_translate_ranks(group, size, ranks.data(), world, places.data());
  MPI_Group_free(&group);
  MPI_Group_free(&world);
  check(code, "MPI_Group_translate_ranks");
  if (std::ranges::find(places, MPI_UNDEFINED) != places.end()) return ranks;
  std::ranges::sort(ranks, {}, [&](int rank) { return std::pair{places[static_cast<std::size_t>(rank)], rank}; });
  return ranks;
}

}  // namespace comm_core
