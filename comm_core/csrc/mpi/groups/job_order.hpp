// The one order in which groups go through their ranks.
#pragma once

#include <mpi.h>

#include <vector>

namespace comm_core {

/// The ranks of `comm`, in the order that their processes have in the whole job; in that of `comm` where some are of
/// another MPI_COMM_WORLD, which every rank of it notices. Only within one world do all groups go by the same order.
std::vector<int> in_job_order(MPI_Comm comm);

}  // namespace comm_core
