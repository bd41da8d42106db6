// What the groups of MPI's engine share.
#pragma once

#include "../engine/groups.hpp"
#include "../schedule/turn.hpp"
#include "groups/retired.hpp"
#include "requests.hpp"

namespace comm_core {

/// On the engine's thread alone.
struct MpiContext {
  Groups groups;
  RequestTable requests;
  RetiredComms retired{requests};
  TurnLock turn_lock;
};

}  // namespace comm_core
