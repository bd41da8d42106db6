// The calls of MPI that return only when all ranks of a communicator have come, and who may make them.
#pragma once

#include <mpi.h>

#include "../../schedule/turn.hpp"

namespace comm_core {

/// [Note: nothing blocks alone] An engine inside such a call answers nobody else, so where ranks are inside those of
/// two communicators, one here, one there, they stay in them for ever. Hence whoever makes one has the turn on all
/// ranks of its communicator; no other file names such a call. All throw std::logic_error where this rank does not
/// have it.
MPI_Comm duplicate(MPI_Comm comm, const TurnLock::Holder& turn);
/// This rank's part, or MPI_COMM_NULL.
MPI_Comm divide(MPI_Comm comm, int color, int key, const TurnLock::Holder& turn);
/// Seconds that a message takes to the ranks that are farthest: the same on all ranks.
double latency(MPI_Comm comm, const TurnLock::Holder& turn);

}  // namespace comm_core
