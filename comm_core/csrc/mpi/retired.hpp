// Communicators that this process uses no more.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <map>
#include <utility>

#include "requests.hpp"

namespace comm_core {

/// MPI_Comm_free is collective, and what a peer still sends must not reach a later communicator that was given the same
/// number. So each is freed when all of its ranks have come here, which a nonblocking barrier tells; until then it is a
/// handle and a request, whatever the group had been.
class RetiredComms final : public RequestOwner {
 public:
  explicit RetiredComms(RequestTable& requests) : requests_(requests) {}

  /// Takes over both, which have the same ranks and on which nothing of this rank is under way.
  void add(MPI_Comm comm, MPI_Comm beside);
  bool empty() const { return comms_.empty(); }
  void complete(const Pending& request, const Outcome& outcome) override;

  /// Gives no communicator back from now on: MPI is being finalized or aborted.
  static void keep() noexcept;
  static bool kept() noexcept;

 private:
  RequestTable& requests_;
  std::map<std::int64_t, std::pair<MPI_Comm, MPI_Comm>> comms_;  // by ticket
  std::int64_t next_ticket_ = 0;
};

}  // namespace comm_core
