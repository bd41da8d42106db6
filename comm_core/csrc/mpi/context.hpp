// What the groups of one engine share.
#pragma once

#include <atomic>
#include <memory>
#include <unordered_map>
#include <vector>

#include "../schedule/turn.hpp"
#include "groups/retired.hpp"
#include "requests.hpp"

namespace comm_core {

class MpiGroup;

/// On the engine's thread alone, but for `readers`.
struct MpiContext {
  RequestTable requests;
  RetiredComms retired{requests};
  TurnLock turn_lock;
  /// Every group until nothing of it is left.
  std::unordered_map<const MpiGroup*, std::shared_ptr<MpiGroup>> groups;
  /// Those that have more to look at than a receive for letters.
  std::vector<MpiGroup*> awake;
  /// Threads that wait for a letter of any group.
  std::shared_ptr<std::atomic<int>> readers = std::make_shared<std::atomic<int>>(0);
  bool closing = false;
};

}  // namespace comm_core
