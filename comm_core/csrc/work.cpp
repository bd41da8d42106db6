#include "comm_core/work.hpp"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "comm_core/deadline.hpp"
#include "comm_core/errors.hpp"
#include "comm_core/process.hpp"

namespace comm_core {

Work::Work(std::string op, std::string label, std::string detail, std::int64_t bytes)
    : op_(std::move(op)), label_(std::move(label)), detail_(std::move(detail)), bytes_(bytes) {}

void Work::wait(std::optional<Seconds> timeout, const std::function<void()>& interrupted) const {
  using Clock = std::chrono::steady_clock;
  constexpr auto kAttention = std::chrono::milliseconds(50);  // between two looks for Ctrl-C
  // Nobody announces the end of what a device does: it is asked, soon at first and then once a millisecond.
  constexpr std::chrono::microseconds kFirstNap{20}, kLongestNap{1000};
  const auto deadline = deadline_after(timeout, "wait");
  if (!done()) {
    require_parent_process();
    auto nap = kFirstNap;
    auto attention = Clock::now() + kAttention;
    std::unique_lock lock(mutex_);
    while (!known_done()) {
      const auto now = Clock::now();
      if (now >= deadline) {
        lock.unlock();
        char seconds[32];
        std::snprintf(seconds, sizeof seconds, "%.3g s", timeout->count());
        throw TimeoutError("not done after waiting " + std::string(seconds) + ": " + describe());
      }
      auto wake = std::min(deadline, attention);
      if (completion_) {
        wake = std::min<Clock::time_point>(wake, now + nap);
        nap = std::min(2 * nap, kLongestNap);
      }
      changed_.wait_until(lock, wake);
      if (known_done()) continue;
      const auto device = completion_;
      const bool look = Clock::now() >= attention;
      lock.unlock();
      if (device) device->poll();
      if (look) {
        attention = Clock::now() + kAttention;
        if (interrupted) interrupted();
      }
      lock.lock();
    }
  }
  if (const auto failure = error()) std::rethrow_exception(failure);
}

bool Work::done() const noexcept {
  if (known_done()) return true;
  if (in_forked_child()) return false;
  if (const auto device = completion()) device->poll();
  return known_done();
}

void Work::order_before(std::uintptr_t stream, const std::function<void()>& interrupted) const {
  require_parent_process();
  if (const auto device = completion()) return device->order_before(stream);
  wait(std::nullopt, interrupted);
}

void Work::attach(std::shared_ptr<Completion> completion) {
  const std::lock_guard lock(mutex_);
  on_device_ = true;
  if (!known_done()) completion_ = std::move(completion);
}

std::shared_ptr<Completion> Work::completion() const noexcept {
  const std::lock_guard lock(mutex_);
  return completion_;
}

std::exception_ptr Work::error() const { return done() ? error_ : nullptr; }

void Work::finish(std::exception_ptr error) noexcept {
  std::shared_ptr<Completion> device;  // its destructor gives things back, so it runs without the lock
  {
    const std::lock_guard lock(mutex_);
    if (known_done()) return;
    device = std::move(completion_);
    error_ = std::move(error);
    end_ = std::chrono::steady_clock::now();
    done_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

double Work::seconds() const noexcept {
  return std::chrono::duration<double>((known_done() ? end_ : std::chrono::steady_clock::now()) - begin_).count();
}

std::string Work::title() const {
  std::string text = op_;
  if (!label_.empty()) text += " '" + label_ + "'";
  if (!detail_.empty()) text += " (" + detail_ + ")";
  return text;
}

std::string Work::describe() const {
  const bool finished = done();
  char state[96];
  const double megabytes = static_cast<double>(arrived_.load(std::memory_order_relaxed)) / 1e6;
  const char* const how = !finished ? "unfinished" : (error_ ? "failed" : "done");
  bool counted = true;  // what a device does is not counted
  {
    const std::lock_guard lock(mutex_);
    counted = !on_device_;
  }
  if (counted) {
    std::snprintf(state, sizeof state, ": %s after %.3f s, %.3f MB received", how, seconds(), megabytes);
  } else {
    std::snprintf(state, sizeof state, ": %s after %.3f s", how, seconds());
  }
  return title() + state;
}

}  // namespace comm_core
