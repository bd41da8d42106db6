// The process's one thread that makes operations progress.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "comm_core/work.hpp"

namespace [[gnu::visibility("default")]] comm_core {

/// What the engine's thread drives. Every member but wake() is called on that thread.
class Driver {
 public:
  virtual ~Driver() = default;
  virtual void open() = 0;
  /// One look at everything under way; true if something happened.
  virtual bool progress() = 0;
  /// Called after a look that found nothing: returns when there may be something to do, and soon after wake().
  virtual void wait() = 0;
  /// Ends a wait(), or the next one where none is under way. On any thread.
  virtual void wake() noexcept = 0;
  /// Something went wrong that no single operation answers for.
  virtual void fail(std::exception_ptr error) = 0;
  /// Nothing is under way any more.
  virtual bool drained() = 0;
  /// Last call. Not reached when draining took too long; see Engine::stop.
  virtual void close() = 0;
};

/// A driver that nobody tells when something arrives: it looks again after a nap.
class NappingDriver : public Driver {
 public:
  void wait() final;
  void wake() noexcept final;

 protected:
  /// How long to sleep.
  virtual std::chrono::microseconds nap() = 0;

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  bool woken_ = false;
};

/// Runs tasks and the driver on one thread, which counts as IEEE 754 says, whatever its creator has set, and blocks all
/// signals but those of a crash: they belong to Python's main thread.
class Engine {
 public:
  using Task = std::function<void()>;

  /// Returns when the driver is open, and throws what open() threw.
  explicit Engine(std::unique_ptr<Driver> driver);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  /// Runs `task` on the engine's thread, in order. One that throws fails the driver, and `work`, which it was to
  /// finish.
  void post(Task task, std::shared_ptr<Work> work = nullptr);
  /// On any thread, also beside stop().
  bool on_engine_thread() const noexcept { return std::this_thread::get_id() == id_; }
  /// Drains, closes the driver and joins. False when the driver was not drained within `patience`: the thread then
  /// still runs, and the process should end without waiting for it.
  bool stop(std::chrono::milliseconds patience);
  bool stopped() const noexcept { return !thread_.joinable(); }

 private:
  struct Job {
    Task task;
    std::shared_ptr<Work> work;
  };
  void run();
  bool run_tasks();

  std::unique_ptr<Driver> driver_;
  std::mutex mutex_;
  std::condition_variable settled_;
  std::deque<Job> tasks_;
  bool opened_ = false, stopping_ = false, closing_ = false, left_ = false;
  std::exception_ptr failure_;
  std::atomic<std::thread::id> id_{};  // none before its first and after its last step
  std::thread thread_;
};

}  // namespace comm_core
