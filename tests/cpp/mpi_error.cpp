// An MPI whose rank $FAILING_RANK cannot receive any more after $FAILING_AFTER messages, or only $FAILING_TIMES not.
// For LD_PRELOAD.
#include <mpi.h>

#include <atomic>
#include <cstdlib>
#include <limits>

extern "C" int MPI_Irecv(void* data, int count, MPI_Datatype type, int source, int tag, MPI_Comm comm,
                         MPI_Request* request) {
  static std::atomic<int> left{std::atoi(std::getenv("FAILING_AFTER"))};
  static const char* const times = std::getenv("FAILING_TIMES");
  static const int last = times != nullptr ? -std::atoi(times) : std::numeric_limits<int>::min();
  int rank = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank == std::atoi(std::getenv("FAILING_RANK"))) {
    const int now = left--;
    if (last < now && now <= 0) return MPI_ERR_OTHER;
  }
  return PMPI_Irecv(data, count, type, source, tag, comm, request);
}
