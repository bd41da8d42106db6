// The one contract of everything asynchronous.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace [[gnu::visibility("default")]] comm_core {

/// A device's side of a Work: the operation was enqueued, and the device will come to it.
class Completion {
 public:
  virtual ~Completion() = default;
  /// Finishes the work if the device has carried it out. Never blocks.
  virtual void poll() noexcept = 0;
  /// Makes what is enqueued on `stream` from now on run after the operation. Returns at once.
  virtual void order_before(std::uintptr_t stream) = 0;
};

/// One operation as its caller sees it. All members may be called from any thread. Dropping an unfinished Work is
/// allowed: the engine keeps the operation and its buffers alive until it is done.
class Work {
 public:
  using Seconds = std::chrono::duration<double>;

  Work(std::string op, std::string label, std::string detail, std::int64_t bytes);
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  /// Blocks until the operation is done and rethrows its error. `interrupted` is called about ten times a second and
  /// may throw to give up (Ctrl-C). Throws TimeoutError when `timeout` passes first; how long that is, deadline_after()
  /// says.
  void wait(std::optional<Seconds> timeout, const std::function<void()>& interrupted) const;
  /// Never blocks.
  bool done() const noexcept;
  /// The same without asking a device: what is known already.
  bool known_done() const noexcept { return done_.load(std::memory_order_acquire); }
  /// Makes what is enqueued on `stream` from now on run after the operation, and throws what went wrong already. Work
  /// without a device is waited for instead, as wait() does.
  void order_before(std::uintptr_t stream, const std::function<void()>& interrupted) const;
  /// The error of a finished operation, else null.
  std::exception_ptr error() const;

  /// Called once, when the operation was handed to a device.
  void attach(std::shared_ptr<Completion> completion);
  /// Called once, by whoever carries the operation out, after its buffers were released.
  void finish(std::exception_ptr error = nullptr) noexcept;
  /// Bytes that arrived so far, for describe().
  void advance(std::int64_t bytes) noexcept { arrived_.fetch_add(bytes, std::memory_order_relaxed); }

  /// What and whose, without its state.
  std::string title() const;
  const std::string& op() const noexcept { return op_; }
  const std::string& label() const noexcept { return label_; }
  std::int64_t bytes() const noexcept { return bytes_; }
  /// Elapsed so far, or in total when done.
  double seconds() const noexcept;
  /// One line for people: what, whose, how large, how long, how far.
  std::string describe() const;

 private:
  std::shared_ptr<Completion> completion() const noexcept;

  const std::string op_, label_, detail_;
  const std::int64_t bytes_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point end_{};
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::exception_ptr error_;
  std::shared_ptr<Completion> completion_;  // guarded by mutex_; null before attach() and after finish()
  bool on_device_ = false;
  std::atomic<bool> done_{false};
  std::atomic<std::int64_t> arrived_{0};
};

}  // namespace comm_core
