// The engine's side of one communicator.
#pragma once

#include <mpi.h>

#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "../context.hpp"
#include "../mailbox.hpp"
#include "../strand.hpp"
#include "abandonment.hpp"
#include "comm_core/operation.hpp"
#include "comm_core/settings.hpp"

namespace comm_core {

/// Everything here happens on the engine's thread. Collectives form one strand; messages one per peer, tag and
/// direction, so that a send may wait for its receive without holding up anything else.
class MpiGroup {
 public:
  /// Takes `comm` over and duplicates it for what is not a collective, and drives the group until nothing of it is
  /// left. Collective, with the same `settings` on all ranks.
  static std::shared_ptr<MpiGroup> make(MpiContext& context, MPI_Comm comm, const TurnLock::Holder& turn,
                                        const Settings& settings);
  /// Takes both communicators over.
  MpiGroup(MpiContext& context, MPI_Comm comm, MPI_Comm beside, const Settings& settings);
  MpiGroup(const MpiGroup&) = delete;
  MpiGroup& operator=(const MpiGroup&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  const std::shared_ptr<Letterbox>& letters() const noexcept { return letters_; }

  void submit(Operation operation, std::shared_ptr<Work> work, KeepAlive memory);
  /// Collective: nobody blocks long in MPI_Comm_split, see [Note: one split at a time]. Hands over the new group, or
  /// null.
  void split(std::optional<int> color, int key, std::shared_ptr<Work> work,
             std::function<void(std::shared_ptr<MpiGroup>)> hand_over);
  void post(int peer, std::string payload, std::shared_ptr<Work> work);
  /// Collective: fails what is unfinished here, and takes what others had sent for it. Once is enough: a later call
  /// waits for the first to come to its end.
  void abandon(std::shared_ptr<Work> work);
  /// Finishes `work` once everything submitted before is complete. Not collective.
  void close(std::shared_ptr<Work> work);
  /// All ranks fail by themselves.
  void fail(std::exception_ptr error) { fail(error, error); }

  bool settle();
  bool closed() const noexcept { return closed_; }
  bool closing() const noexcept { return closing_ != nullptr; }
  /// Waits for its peers, to close or before.
  bool leaving() const { return closing() || (abandonment_ && !abandonment_->over()); }
  /// No operation is under way or waiting.
  bool idle() const;
  /// Nor is any message of finished ones still on its way to a peer.
  bool delivered() const { return drained() && mailbox_->drained(); }
  /// Nothing to look at until something is submitted or a letter arrives.
  bool at_rest() const { return delivered() && !leaving(); }
  /// From here on wake() is needed again.
  void rest() noexcept { awake_ = false; }
  /// Closed, and no request names anything of it any more: it may be forgotten.
  bool over() const { return closed_ && quiet(); }
  std::int64_t bytes_left() const;

 private:
  /// What comes from here on, as it may while the process ends, is refused: a closed group may be forgotten any time.
  bool shut() const noexcept { return closed() || closing(); }
  Strand& message_strand(const Operation& operation);
  bool drained() const;
  bool quiet() const { return delivered() && (!abandonment_ || abandonment_->quiet()); }
  void fail(std::exception_ptr error, std::exception_ptr later);
  /// Fails on this rank, and tells the others.
  void fail_here(const std::exception_ptr& error);
  void tell(const std::string& reason);
  void try_to_close();
  /// Has it looked at. Whatever gives a group something to do calls it.
  void wake();

  MpiContext& context_;
  const Settings settings_;
  MPI_Comm comm_, beside_;                              // of collectives; of letters and messages
  int rank_ = 0, size_ = 1, before_ = -1, after_ = -1;  // the last two: see Turn
  const int largest_tag_;
  std::shared_ptr<Letterbox> letters_;
  std::exception_ptr failure_;  // what operations end with that come after it
  std::unique_ptr<Strand> collectives_;
  std::map<std::pair<int, std::pair<int, bool>>, std::unique_ptr<Strand>> messages_;  // by tag, peer, sends
  std::unique_ptr<Mailbox> mailbox_;
  std::unique_ptr<Abandonment> abandonment_;
  std::shared_ptr<Work> closing_;
  std::chrono::steady_clock::time_point closing_since_;
  bool closed_ = false, awake_ = false;
};

}  // namespace comm_core
