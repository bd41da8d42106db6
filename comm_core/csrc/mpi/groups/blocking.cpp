#include "blocking.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>
#include <string>

#include "../check.hpp"

namespace comm_core {
namespace {

void require(const TurnLock::Holder& turn, const char* call) {
  if (!turn.holds())
    throw std::logic_error(std::string(call) + " would block the engine, which does not have the turn");
}

}  // namespace

MPI_Comm duplicate(MPI_Comm comm, const TurnLock::Holder& turn) {
  require(turn, "MPI_Comm_dup");
  MPI_Comm made = MPI_COMM_NULL;
  check(MPI_Comm_dup(comm, &made), "MPI_Comm_dup");
  return made;
}

MPI_Comm divide(MPI_Comm comm, int color, int key, const TurnLock::Holder& turn) {
  require(turn, "MPI_Comm_split");
  MPI_Comm part = MPI_COMM_NULL;
  check(MPI_Comm_split(comm, color, key, &part), "MPI_Comm_split");
  return part;
}

double latency(MPI_Comm comm, const TurnLock::Holder& turn) {
  require(turn, "MPI_Barrier");
  int size = 1;
  check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  if (size == 1) return 0;
  // Who comes late finds the others' messages there, and those then wait for it twice as long: two barriers in a row
  // are what counts. The first one waits for who comes last, and for connections.
  constexpr int kBarriers = 4;
  check(MPI_Barrier(comm), "MPI_Barrier");
  double shortest = std::numeric_limits<double>::infinity(), before = shortest;
  for (int i = 0; i < kBarriers; ++i) {
    const double begun = MPI_Wtime();
    check(MPI_Barrier(comm), "MPI_Barrier");
    const double took = MPI_Wtime() - begun;
    shortest = std::min(shortest, (before + took) / 2);
    before = took;
  }
  check(MPI_Allreduce(MPI_IN_PLACE, &shortest, 1, MPI_DOUBLE, MPI_MAX, comm), "MPI_Allreduce");
  return shortest / std::bit_width(static_cast<unsigned>(size - 1));  // a barrier has so many turns
}

}  // namespace comm_core
