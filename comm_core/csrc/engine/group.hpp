// The engine's side of one communicator, whatever moves its bytes.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "abandonment.hpp"
#include "comm_core/operation.hpp"
#include "comm_core/settings.hpp"
#include "groups.hpp"
#include "letterbox.hpp"
#include "mail.hpp"
#include "strand.hpp"

namespace [[gnu::visibility("default")]] comm_core {

/// Everything here happens on the engine's thread. Collectives form one strand; messages one per peer, tag and
/// direction, so that a send may wait for its receive without holding up anything else.
class Group {
 public:
  /// Receives the new group, or null on a rank that is not a member.
  using HandOver = std::function<void(std::shared_ptr<Group>)>;

  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  virtual ~Group();

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  const std::shared_ptr<Letterbox>& letters() const noexcept { return letters_; }

  void submit(Operation operation, std::shared_ptr<Work> work, KeepAlive memory);
  /// Collective. Runs after all operations submitted before it.
  void split(std::optional<int> color, int key, std::shared_ptr<Work> work, HandOver hand_over);
  /// The group of these ranks, of which this is one; they give the same name, and no other part has it. Not collective.
  virtual std::shared_ptr<Group> part(const std::vector<int>& ranks, const std::string& name);
  void post(int peer, std::string payload, std::shared_ptr<Work> work);
  /// Collective: fails what is unfinished here, and takes what others had sent for it. Once is enough: a later call
  /// waits for the first to come to its end.
  void abandon(std::shared_ptr<Work> work);
  /// Finishes `work` once everything submitted before is complete. Not collective.
  void close(std::shared_ptr<Work> work);
  /// All ranks fail by themselves.
  void fail(const std::exception_ptr& error) { fail(error, error); }

  bool settle();
  bool closed() const noexcept { return closed_; }
  bool closing() const noexcept { return closing_ != nullptr; }
  /// Waits for its peers, to close or before.
  bool leaving() const { return closing() || (abandonment_ && !abandonment_->over()); }
  /// No operation is under way or waiting.
  bool idle() const;
  /// Nor is any message of finished ones still on its way to a peer.
  bool delivered() const { return drained() && mail_->drained(); }
  /// Nothing to look at until something is submitted or arrives.
  bool at_rest() const { return delivered() && !leaving(); }
  /// From here on wake() is needed again.
  void rest() noexcept { awake_ = false; }
  /// Closed, and no transfer names anything of it any more: it may be forgotten.
  bool over() const { return closed_ && quiet(); }
  std::int64_t bytes_left() const;
  /// Has it looked at. Whatever gives a group something to do calls it.
  void wake();

 protected:
  /// `largest_signature`: see signature_of(). `first_signature`: of messages with tag 0.
  Group(Groups& groups, int rank, int size, const Settings& settings, int largest_signature, int first_signature);
  /// To be called once, before anything else.
  void open(std::unique_ptr<Strand> collectives, std::unique_ptr<Mail> mail);

  Groups& groups() noexcept { return groups_; }
  const Settings& settings() const noexcept { return settings_; }
  Strand& collectives() noexcept { return *collectives_; }
  bool failed() const noexcept { return failure_ != nullptr; }
  /// Fails on this rank, and tells the others.
  void fail_here(const std::exception_ptr& error);

  /// For send and recv with `peer` by `tag`.
  virtual std::unique_ptr<Strand> make_message_strand(int peer, int tag, bool sends) = 0;
  /// What a split does in its turn among the collectives.
  virtual Item split_item(std::optional<int> color, int key, HandOver hand_over) = 0;
  virtual std::unique_ptr<Abandonment> make_abandonment(std::shared_ptr<Work> work) = 0;
  /// Tells the other ranks why the group has failed here.
  virtual void tell(const std::string& reason) = 0;
  /// It has closed; `clean`: it has not failed, and everything was delivered.
  virtual void retire(bool clean) = 0;

 private:
  /// What comes from here on, as it may while the process ends, is refused: a closed group may be forgotten any time.
  bool shut() const noexcept { return closed() || closing(); }
  Strand& message_strand(const Operation& operation);
  bool drained() const;
  bool quiet() const { return delivered() && (!abandonment_ || abandonment_->quiet()); }
  void fail(const std::exception_ptr& error, const std::exception_ptr& later);
  void try_to_close();

  Groups& groups_;
  const int rank_, size_;
  const Settings settings_;
  const int largest_signature_, first_signature_;
  std::shared_ptr<Letterbox> letters_;
  std::exception_ptr failure_;  // what operations end with that come after it
  std::unique_ptr<Strand> collectives_;
  std::map<std::pair<int, std::pair<int, bool>>, std::unique_ptr<Strand>> messages_;  // by tag, peer, sends
  std::unique_ptr<Mail> mail_;
  std::unique_ptr<Abandonment> abandonment_;
  std::shared_ptr<Work> closing_;
  std::chrono::steady_clock::time_point closing_since_;
  bool closed_ = false, awake_ = false;
};

}  // namespace comm_core
