#include "comm_core/work.hpp"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "comm_core/errors.hpp"
#include "comm_core/process.hpp"

namespace comm_core {

Work::Work(std::string op, std::string label, std::string detail, std::int64_t bytes)
    : op_(std::move(op)), label_(std::move(label)), detail_(std::move(detail)), bytes_(bytes) {}

void Work::wait(std::optional<Seconds> timeout, const std::function<void()>& interrupted) const {
  using Clock = std::chrono::steady_clock;
  constexpr auto kAttention = std::chrono::milliseconds(50);  // between two looks for Ctrl-C
  if (!done()) {
    require_parent_process();
    // Centuries do not fit the clock's nanoseconds; nobody notices a limit of one year.
    const Seconds patience = std::min(timeout.value_or(Seconds::max()), Seconds(365 * 86400.0));
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::max(patience, Seconds(0)));
    std::unique_lock lock(mutex_);
    while (!done()) {
      const auto now = Clock::now();
      if (now >= deadline) {
        lock.unlock();
        char seconds[32];
        std::snprintf(seconds, sizeof seconds, "%.3g s", patience.count());
        throw TimeoutError("not done after waiting " + std::string(seconds) + ": " + describe());
      }
      changed_.wait_until(lock, std::min(deadline, now + kAttention));
      if (done() || !interrupted) continue;
      lock.unlock();
      interrupted();
      lock.lock();
    }
  }
  if (const auto failure = error()) std::rethrow_exception(failure);
}

std::exception_ptr Work::error() const { return done() ? error_ : nullptr; }

void Work::finish(std::exception_ptr error) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (done()) return;
    error_ = std::move(error);
    end_ = std::chrono::steady_clock::now();
    done_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

double Work::seconds() const noexcept {
  return std::chrono::duration<double>((done() ? end_ : std::chrono::steady_clock::now()) - begin_).count();
}

std::string Work::describe() const {
  std::string text = op_;
  if (!label_.empty()) text += " '" + label_ + "'";
  if (!detail_.empty()) text += " (" + detail_ + ")";
  char state[96];
  const double megabytes = static_cast<double>(arrived_.load(std::memory_order_relaxed)) / 1e6;
  std::snprintf(state, sizeof state, ": %s after %.3f s, %.3f MB received",
                !done() ? "unfinished" : (error_ ? "failed" : "done"), seconds(), megabytes);
  return text + state;
}

}  // namespace comm_core
