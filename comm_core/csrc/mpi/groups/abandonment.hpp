// The end of a group in which some ranks have issued operations that others never will.
#pragma once

#include <mpi.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <vector>

#include "../requests.hpp"
#include "comm_core/work.hpp"

namespace comm_core {

/// Takes what peers have sent and nobody waits for, until nothing of any rank is under way any more: MPI can neither
/// give up a send nor be finalized before it is complete. Who has nothing of its own left enters a barrier, and takes
/// messages until that is over (nonblocking consensus, NBX: Hoefler, Siebert and Lumsdaine, "Scalable Communication
/// Protocols for Dynamic Sparse Data Exchange", PPoPP 2010).
class Abandonment final : public RequestOwner {
 public:
  /// On every rank of `comm` and `beside`, which has cancelled its own receives there. The barrier is on `beside`.
  /// Finishes `work` at the end, and in any case when nothing has come of it for settings().exit_patience.
  Abandonment(RequestTable& requests, MPI_Comm comm, MPI_Comm beside, std::shared_ptr<Work> work);
  /// Finishes `work` together with the first.
  void also(std::shared_ptr<Work> work);

  /// Goes on; `sent`: nothing that this rank has sent, or was receiving, is under way. True if something changed.
  bool settle(bool sent);
  bool over() const { return works_.front()->done(); }
  /// Everything came to its end.
  bool quiet() const { return barrier_done_ && messages_.empty(); }

  void complete(const Pending& request, const Outcome& outcome) override;

 private:
  bool take(MPI_Comm comm);
  void finish(std::exception_ptr error = nullptr);

  RequestTable& requests_;
  MPI_Comm comm_, beside_;
  std::vector<std::shared_ptr<Work>> works_;  // of all who asked
  std::chrono::steady_clock::time_point last_change_;
  std::map<std::int64_t, std::vector<std::byte>> messages_;  // being received, by ticket
  std::int64_t next_ticket_ = 0;
  bool barrier_posted_ = false, barrier_done_ = false;
};

}  // namespace comm_core
