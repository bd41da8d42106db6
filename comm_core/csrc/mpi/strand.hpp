// Operations that follow one another over one communicator and tag.
#pragma once

#include <mpi.h>

#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "../schedule/schedule.hpp"
#include "comm_core/errors.hpp"
#include "comm_core/types.hpp"
#include "comm_core/work.hpp"
#include "requests.hpp"

namespace comm_core {

/// The group has failed on another rank first, for a `reason` that goes from rank to rank as it is.
class PeerFailure : public TransportError {
 public:
  PeerFailure(const std::string& doing, std::string reason)
      : TransportError(doing + reason), reason_(std::move(reason)) {}
  const std::string& reason() const noexcept { return reason_; }

 private:
  std::string reason_;
};

/// One operation of a strand.
struct Item {
  int tag;                                          ///< of its messages: see Strand::Tags
  std::function<std::unique_ptr<Schedule>()> make;  ///< called when its turn comes; none: nothing to send
  std::shared_ptr<Work> work;                       ///< may be null
  KeepAlive memory;
  std::function<void()> done;  ///< called in its turn, after the schedule finished and before `work` does
  std::function<void()> failed =
      nullptr;  ///< called where the strand fails after it started, before `work` does; may be null
};

/// An operation whose schedule started.
struct Running {
  Item item;
  std::unique_ptr<Schedule> schedule;
  std::optional<std::list<std::unique_ptr<Running>>::iterator> draining = std::nullopt;  ///< its place there
};

/// Starts an item when the one before it is finished. What a finished item still has under way drains beside the items
/// after it; all its messages are posted by then, so the matching order stays right.
///
/// A root is finished with an operation that other ranks have not begun. Only so many collectives drain at a time: a
/// rank that is further ahead waits until others have caught up, who need nothing of it but what it has begun.
class Strand final : public Transport, public RequestOwner {
 public:
  using OnFailure = std::function<void(std::exception_ptr)>;
  /// What tags tell: one strand from others on its communicator; or, of a strand that has a communicator to itself,
  /// what an operation is, so that whoever receives its messages notices at no cost where another rank means another
  /// one.
  enum class Tags { kStrand, kSignature };
  Strand(RequestTable& requests, MPI_Comm comm, Tags tags, int rank, OnFailure on_failure);

  void add(Item item);
  /// Finishes and starts what can be; true if something changed.
  bool settle();
  bool idle() const { return running_ == nullptr && waiting_.empty(); }
  bool drained() const { return idle() && draining_.empty(); }
  std::int64_t bytes_left() const { return running_ ? running_->schedule->bytes_left() : 0; }
  /// Ends what is under way with `error`, and what has not begun, now or later, with `later`. Memory that MPI may still
  /// touch stays alive.
  void fail(std::exception_ptr error, std::exception_ptr later);

  void send(int peer, const std::byte* data, std::int64_t bytes, SendMode mode, Schedule& from,
            std::int64_t ticket) override;
  void receive(int peer, std::byte* data, std::int64_t bytes, Schedule& to, std::int64_t ticket) override;
  void complete(const Pending& request, const Outcome& outcome) override;

 private:
  bool may_start() const;
  void start_next();
  void let_drain(std::unique_ptr<Running> running);
  void forget_if_drained(const Running& running);
  void finish(std::unique_ptr<Running> running);
  std::string title(const Running& running, const char* verb, int peer, std::int64_t bytes) const;

  RequestTable& requests_;
  MPI_Comm comm_;
  const Tags tags_;
  const int rank_;
  OnFailure on_failure_;
  std::exception_ptr failure_;  // what an operation ends with that comes too late
  std::deque<Item> waiting_;
  std::unique_ptr<Running> running_;
  std::list<std::unique_ptr<Running>> draining_;
};

}  // namespace comm_core
