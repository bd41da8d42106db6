// All MPI requests of the process, tested in one call.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../engine/strand.hpp"

namespace comm_core {

struct Pending;

/// How a request ended.
struct Ended {
  int error = MPI_SUCCESS;  ///< or the request's own code
  int source = 0, tag = 0;  ///< of what was received
  std::int64_t bytes = 0;
  std::string reason = {};  ///< of a message of failure_signature(): why its sender has failed
};

/// What a rank says of its own failure is no longer: it goes at once, whether or not it is received.
constexpr std::int64_t kMostOfAReason = 1024;

/// Whoever posted a request.
class RequestOwner {
 public:
  virtual ~RequestOwner() = default;
  virtual void complete(const Pending& request, const Ended& ended) = 0;
};

struct Pending {
  RequestOwner* owner = nullptr;
  Transfer transfer;                     ///< of an owner that is no strand: its ticket, and whether it is a send
  std::byte* target = nullptr;           ///< where a message of just `bytes` is copied to from `landing`
  std::unique_ptr<std::byte[]> landing;  ///< see RequestTable::landing(); none: it goes to its memory directly
};

class RequestTable {
 public:
  void add(MPI_Request request, Pending pending);
  /// Memory for any message of a schedule, to receive a short one.
  ///
  /// [Note: room for the longest] Where a message is longer than its receive, because ranks disagree about an
  /// operation, MPI_ERR_TRUNCATE is all that should come of it. Open MPI 5.0 writes all of the message nevertheless
  /// where its ob1 copies from process to process (CMA) or puts over TCP: into whatever lies behind. So a receive is
  /// never shorter than a segment, which no message of a schedule is longer than, and the error is ours.
  std::unique_ptr<std::byte[]> landing();
  /// Reports what completed since the last look; true if something did.
  bool progress();
  /// Asks MPI to give up the owner's receives; they are reported like any other.
  void cancel_receives(const RequestOwner& owner);
  bool has(const RequestOwner& owner) const;
  std::int64_t bytes_received() const { return bytes_received_; }

 private:
  struct Done {
    Pending pending;
    Ended ended;
  };
  bool test();

  std::vector<MPI_Request> requests_;
  std::vector<Pending> pending_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::vector<Done> done_;
  std::vector<std::unique_ptr<std::byte[]>> landings_;  // free ones
  std::int64_t bytes_received_ = 0;
};

}  // namespace comm_core
