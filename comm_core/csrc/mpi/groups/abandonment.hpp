// The end of a group of MPI in which some ranks have issued operations that others never will.
#pragma once

#include <mpi.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <vector>

#include "../../engine/abandonment.hpp"
#include "../requests.hpp"
#include "comm_core/work.hpp"

namespace comm_core {

/// Takes what peers have sent and nobody waits for, until nothing of any rank is under way any more: MPI can neither
/// give up a send nor be finalized before it is complete. Who has nothing of its own left enters a barrier, and takes
/// messages until that is over (nonblocking consensus, NBX: Hoefler, Siebert and Lumsdaine, "Scalable Communication
/// Protocols for Dynamic Sparse Data Exchange", PPoPP 2010).
class MpiAbandonment final : public Abandonment, public RequestOwner {
 public:
  /// On every rank of `comm` and `beside`, which has cancelled its own receives there. The barrier is on `beside`.
  /// Finishes `work` at the end, and in any case when nothing has come of it for settings().exit_patience.
  MpiAbandonment(RequestTable& requests, MPI_Comm comm, MPI_Comm beside, std::shared_ptr<Work> work);
  bool settle(bool sent) override;
  bool quiet() const override { return barrier_done_ && messages_.empty(); }

  void complete(const Pending& request, const Ended& ended) override;

 private:
  bool take(MPI_Comm comm);

  RequestTable& requests_;
  MPI_Comm comm_, beside_;
  std::chrono::steady_clock::time_point last_change_;
  std::map<std::int64_t, std::vector<std::byte>> messages_;  // being received, by ticket
  std::int64_t next_ticket_ = 0;
  bool barrier_posted_ = false, barrier_done_ = false;
};

}  // namespace comm_core
