// Operations that follow one another, over whatever moves their messages.
#pragma once

#include <cstdint>
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

namespace [[gnu::visibility("default")]] comm_core {

class Strand;

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
  int signature;                                    ///< of its messages: see Strand::Signatures
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

/// One message of an operation, sent or to be received, until it is reported to complete() or dropped().
struct Transfer {
  Strand* strand = nullptr;
  Running* running = nullptr;
  Schedule* schedule = nullptr;
  std::int64_t ticket = 0;
  int peer = 0;
  std::int64_t bytes = 0;
  bool is_send = false;
};

/// How a transfer ended.
struct Outcome {
  std::exception_ptr error = nullptr;      ///< the transport's
  std::optional<std::string> reason = {};  ///< the peer sends nothing any more: why its group has failed
  int signature = 0;                       ///< of what was received
  std::int64_t bytes = 0;                  ///< of what was received, also where that was too long
};

/// Starts an item when the one before it is finished. What a finished item still has under way drains beside the items
/// after it; all its messages are posted by then, so the matching order stays right.
///
/// A root is finished with an operation that other ranks have not begun. Only so many collectives drain at a time: a
/// rank that is further ahead waits until others have caught up, who need nothing of it but what it has begun.
///
/// Everything happens on the engine's thread. Whoever moves the messages derives from it.
class Strand : public Transport {
 public:
  using OnFailure = std::function<void(std::exception_ptr)>;
  /// What the signature of a message says: of collectives, what the operation is, so that whoever receives it notices
  /// at no cost where another rank means another one; of others, nothing that the strand looks at.
  enum class Signatures { kOperation, kAny };
  Strand(Signatures signatures, int rank, OnFailure on_failure);
  Strand(const Strand&) = delete;
  Strand& operator=(const Strand&) = delete;
  ~Strand() override;

  void add(Item item);
  /// Finishes and starts what can be; true if something changed.
  bool settle();
  bool idle() const { return running_ == nullptr && waiting_.empty(); }
  bool drained() const { return idle() && draining_.empty(); }
  /// The operation under way, in words; empty: none, or a nameless one.
  std::string running() const { return running_ && running_->item.work ? running_->item.work->describe() : ""; }
  std::int64_t bytes_left() const { return running_ ? running_->schedule->bytes_left() : 0; }
  /// Ends what is under way with `error`, and what has not begun, now or later, with `later`. Memory that the transport
  /// may still touch stays alive.
  void fail(std::exception_ptr error, std::exception_ptr later);

  void send(int peer, const std::byte* data, std::int64_t bytes, SendMode mode, Schedule& from,
            std::int64_t ticket) final;
  void receive(int peer, std::byte* data, std::int64_t bytes, Schedule& to, std::int64_t ticket) final;

  /// Called once for each transfer that was posted and not dropped. Fails the strand where the outcome is none.
  void complete(const Transfer& transfer, const Outcome& outcome);
  /// The transport has given up a transfer of a strand that failed.
  void dropped(const Transfer& transfer);

 protected:
  Signatures signatures() const { return signatures_; }
  int rank() const { return rank_; }
  /// Never calls complete() before it returns; what throws is not posted.
  virtual void post_send(const Transfer& transfer, const std::byte* data, SendMode mode, int signature) = 0;
  virtual void post_receive(const Transfer& transfer, std::byte* data, int signature) = 0;
  /// Gives up what was posted, as far as that can be done; each is still reported, now or later.
  virtual void give_up() = 0;
  std::string title(const Transfer& transfer) const;

 private:
  bool may_start() const;
  void start_next();
  void let_drain(std::unique_ptr<Running> running);
  void forget_if_drained(const Running& running);
  void finish(std::unique_ptr<Running> running);
  void require_as_meant(const Transfer& transfer, const Outcome& outcome) const;

  const Signatures signatures_;
  const int rank_;
  OnFailure on_failure_;
  std::exception_ptr failure_;  // what an operation ends with that comes too late
  std::deque<Item> waiting_;
  std::unique_ptr<Running> running_;
  std::list<std::unique_ptr<Running>> draining_;
};

}  // namespace comm_core
