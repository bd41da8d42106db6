// Communicators that this process uses no more.
#pragma once

#include <mpi.h>

#include <array>
#include <cstdint>
#include <map>

#include "../requests.hpp"

namespace comm_core {

/// MPI_Comm_free is collective, and what a peer still sends must not reach a later communicator that was given the same
/// number. So each rank tells the others, by a nonblocking sum over all of them, what it leaves behind; when all have
/// come and nothing is left of any, each frees it. Where the group has failed on a rank, or a letter came too late to
/// be taken, a message that is complete for its sender may still be on its way, for which MPI has no end: such a
/// communicator is never freed. Meanwhile it is a handle and a request, whatever the group had been.
class RetiredComms final : public RequestOwner {
 public:
  explicit RetiredComms(RequestTable& requests) : requests_(requests) {}

  /// What a rank leaves behind in a group.
  struct Remains {
    bool failed;           ///< the group has, or could not deliver everything
    std::int64_t letters;  ///< those that this rank has posted, less those it has taken
  };
  /// Takes over both, which have the same ranks.
  void add(MPI_Comm comm, MPI_Comm beside, Remains remains);
  /// Some rank has not come yet, to a group that did not fail here.
  bool waiting() const { return num_awaited_ > 0; }
  void complete(const Pending& request, const Ended& ended) override;

  /// Gives no communicator back from now on: MPI is being finalized or aborted.
  static void keep() noexcept;

 private:
  struct Comms {
    MPI_Comm comm, beside;
    std::array<std::int64_t, 2> here, everywhere;  // failures and letters
  };

  RequestTable& requests_;
  std::map<std::int64_t, Comms> comms_;  // by ticket
  std::int64_t next_ticket_ = 0, num_awaited_ = 0;
};

}  // namespace comm_core
