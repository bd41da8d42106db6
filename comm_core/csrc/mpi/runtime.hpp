// The process's MPI engine, between the calling threads and the driver.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>

#include "../engine/engine.hpp"
#include "comm_core/backend.hpp"
#include "driver.hpp"

namespace comm_core {

/// Exists once and is never destroyed: MPI's own callbacks may reach it until the process ends.
class MpiRuntime final : public Provider {
 public:
  Birth connect(std::optional<std::intptr_t> handle, std::shared_ptr<Work> work) override;
  void finalize() override;
  bool abort(int code) noexcept override;
  std::map<std::string, std::string> describe() const override;

  /// Runs `task` on the engine's thread; one that throws fails `work`. Throws Error after finalize().
  void post(Engine::Task task, std::shared_ptr<Work> work = nullptr);
  MpiDriver& driver() { return *driver_; }

 private:
  void start();
  bool stop();
  void foreign_finalize() noexcept;

  std::mutex mutex_;  // guards starting and stopping
  MpiDriver* driver_ = nullptr;
  std::unique_ptr<Engine> owned_;
  std::atomic<Engine*> engine_{nullptr};  // null before start(); abort() must not wait for the mutex
  std::atomic<bool> stopped_{false};
};

}  // namespace comm_core
