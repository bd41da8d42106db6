// A group of all processes, or of those of somebody else's communicator, while it is being made.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "../../engine/group.hpp"
#include "../../schedule/turn.hpp"
#include "../context.hpp"
#include "../requests.hpp"
#include "comm_core/work.hpp"

namespace comm_core {

/// Takes the turn on all ranks of a foreign communicator, as Turn does within a group, but by nonblocking collectives:
/// messages would meet the receives of whoever it belongs to. All come to a barrier; then every rank in the order of
/// the job has its own lock before it broadcasts a token. Who has got all tokens goes in.
class Connector final : public RequestOwner {
 public:
  using HandOver = Group::HandOver;
  Connector(MpiContext& context, MPI_Comm comm, std::shared_ptr<Work> work, HandOver hand_over);

  /// Goes on. Two of one communicator follow each other: see MpiDriver::settle_connectors.
  bool settle();
  bool over() const { return work_->done(); }
  MPI_Comm comm() const { return comm_; }

  void complete(const Pending& request, const Ended& ended) override;

 private:
  void begin();
  void follow(int code, const char* call, MPI_Request request);
  void make();

  MpiContext& context_;
  MPI_Comm comm_;
  std::shared_ptr<Work> work_;
  HandOver hand_over_;
  TurnLock::Holder turn_;
  int rank_ = 0;
  std::vector<int> order_;  // of the job; empty before begin()
  std::size_t num_tokens_ = 0;
  std::byte token_{1};
  bool under_way_ = false, gathered_ = false;
};

}  // namespace comm_core
