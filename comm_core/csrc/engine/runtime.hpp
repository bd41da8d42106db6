// A backend's engine, between the calling threads and the driver.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "comm_core/backend.hpp"
#include "engine.hpp"
#include "group.hpp"

namespace [[gnu::visibility("default")]] comm_core {

/// Exists once and is never destroyed: callbacks may reach it until the process ends.
class Runtime : public Provider {
 public:
  void finalize() override;

  /// Runs `task` on the engine's thread; one that throws fails `work`. Throws Error after finalize().
  void post(Engine::Task task, std::shared_ptr<Work> work = nullptr);
  /// What the calling threads hold of a group, of which they touch nothing: all of it happens in tasks for the engine.
  std::unique_ptr<Backend> backend_of(std::shared_ptr<Group> group, const char* name);

 protected:
  /// Starts the engine unless it runs. Throws Unsupported after finalize().
  void start();
  /// False where operations are unfinished that no peer answers.
  bool stop();
  /// Null before start(). Any thread, also beside stop().
  Engine* engine() const noexcept { return engine_; }
  bool stopped() const noexcept { return stopped_; }

  virtual std::unique_ptr<Driver> make_driver() = 0;
  /// Closes every group. On the engine's thread.
  virtual void close_groups() = 0;

 private:
  std::mutex mutex_;  // guards starting and stopping
  std::unique_ptr<Engine> owned_;
  std::atomic<Engine*> engine_{nullptr};  // abort() must not wait for the mutex
  std::atomic<bool> stopped_{false};
};

}  // namespace comm_core
