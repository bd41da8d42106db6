// What the engine drives when plain TCP carries the bytes.
#pragma once

#include <atomic>
#include <memory>
#include <unordered_map>
#include <vector>

#include "../engine/engine.hpp"
#include "../engine/groups.hpp"
#include "group.hpp"
#include "world.hpp"

namespace comm_core {

/// Sleeps until the kernel has something for it: bytes that arrived, room for bytes to send, or a task. Nothing is
/// done while nothing happens.
class TcpDriver final : public Driver {
 public:
  void open() override;
  bool progress() override;
  void wait() override;
  void wake() noexcept override;
  void fail(std::exception_ptr error) override { groups_.fail(error); }
  bool drained() override { return groups_.closed() && worlds_.empty(); }
  void close() override {}

  /// The group of all ranks of a mesh.
  std::shared_ptr<Group> connect(Mesh mesh);
  void close_groups() { groups_.close(); }

 private:
  bool waits_for_peers() const;

  Socket poll_, event_;
  std::atomic<bool> woken_{false};
  Groups groups_;
  std::vector<std::shared_ptr<World>> worlds_;
};

}  // namespace comm_core
