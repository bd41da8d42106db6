#include "blocking.hpp"

#include <stdexcept>
#include <string>

#include "check.hpp"

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

}  // namespace comm_core
