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
#include "context.hpp"
#include "groups/connector.hpp"
#include "session.hpp"

namespace comm_core {

class MpiDriver final : public NappingDriver {
 public:
  explicit MpiDriver(std::function<void()> on_foreign_finalize);
  ~MpiDriver() override;

  void open() override;
  bool progress() override;
  void fail(std::exception_ptr error) override;
  bool drained() override;
  void close() override;

  /// Collective over `handle` (a Fortran handle), or all processes: duplicates it and hands over the new group.
  void connect(std::optional<std::intptr_t> handle, std::shared_ptr<Work> work, Connector::HandOver hand_over);
  /// Closes every group.
  void close_groups();

 private:
  std::chrono::microseconds nap() override;
  bool settle_connectors();

  std::function<void()> on_foreign_finalize_;
  std::unique_ptr<MpiSession> session_;
  MpiContext context_;
  std::list<std::unique_ptr<Connector>> connectors_;
  std::chrono::steady_clock::time_point closing_since_;
  Pace pace_;
};

}  // namespace comm_core
