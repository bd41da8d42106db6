// The groups of one engine.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <unordered_map>
#include <vector>

namespace [[gnu::visibility("default")]] comm_core {

class Group;

/// On the engine's thread alone, but for `readers`.
class Groups {
 public:
  /// Drives a group until nothing of it is left.
  void add(std::shared_ptr<Group> group);
  /// Has it looked at, once more.
  void wake(Group& group) { awake_.push_back(&group); }
  /// Lets those go on that have something to do; true if something changed.
  bool settle();

  void fail(const std::exception_ptr& error);
  /// Closes all of them, and those that are added later.
  void close();
  bool closed() const;
  bool closing() const noexcept { return closing_; }

  /// Those that have something to do.
  const std::vector<Group*>& awake() const noexcept { return awake_; }
  bool empty() const noexcept { return all_.empty(); }
  /// How many threads wait for a letter of any group.
  const std::shared_ptr<std::atomic<int>>& readers() const noexcept { return readers_; }

 private:
  std::unordered_map<const Group*, std::shared_ptr<Group>> all_;
  std::vector<Group*> awake_;
  std::shared_ptr<std::atomic<int>> readers_ = std::make_shared<std::atomic<int>>(0);
  bool closing_ = false;
};

}  // namespace comm_core
