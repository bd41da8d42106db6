// What the engine drives when MPI carries the bytes.
#pragma once

#include <mpi.h>

#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <optional>

#include "../engine/engine.hpp"
#include "../engine/pace.hpp"
#include "group.hpp"
#include "requests.hpp"
#include "session.hpp"

namespace comm_core {

class MpiDriver final : public Driver {
 public:
  explicit MpiDriver(std::function<void()> on_foreign_finalize);
  ~MpiDriver() override;

  void open() override;
  bool progress() override;
  std::chrono::microseconds nap() override;
  void fail(std::exception_ptr error) override;
  bool drained() override;
  void close() override;

  /// Collective over `handle` (a Fortran handle), or all processes: duplicates it and hands over the new group.
  void connect(std::optional<std::intptr_t> handle, std::shared_ptr<Work> work,
               std::function<void(std::shared_ptr<MpiGroup>)> hand_over);
  /// Drives the group from here on, until it is closed and nothing of it is under way.
  void adopt(std::shared_ptr<MpiGroup> group);
  RequestTable& requests() { return requests_; }
  /// Closes every group.
  void close_groups();

 private:
  class Connector;

  std::function<void()> on_foreign_finalize_;
  std::unique_ptr<MpiSession> session_;
  RequestTable requests_;
  std::list<std::shared_ptr<MpiGroup>> groups_;
  std::list<std::unique_ptr<Connector>> connectors_;
  Pace pace_;
};

}  // namespace comm_core
