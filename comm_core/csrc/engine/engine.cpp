#include "engine.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

#include <cfenv>
#include <utility>

#include "comm_core/errors.hpp"

namespace comm_core {
namespace {

/// New threads inherit the mask of their creator: the engine's, and those that MPI starts on it. A crash stays visible:
/// while its signal is blocked, the kernel ends the process without a word, also where faulthandler or MPI listens.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (const int crash : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&all, crash);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

}  // namespace

void NappingDriver::wait() {
  const auto longest = nap();
  std::unique_lock lock(mutex_);
  wake_.wait_for(lock, longest, [this] { return woken_; });
  woken_ = false;
}

void NappingDriver::wake() noexcept {
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  wake_.notify_one();
}

Engine::Engine(std::unique_ptr<Driver> driver) : driver_(std::move(driver)) {
  {
    const SignalsBlocked blocked;
    thread_ = std::thread([this] { run(); });
  }
  std::unique_lock lock(mutex_);
  settled_.wait(lock, [this] { return opened_ || left_; });
  if (!failure_) return;
  lock.unlock();
  thread_.join();
  std::rethrow_exception(failure_);
}

Engine::~Engine() {
  // An engine that was not stopped belongs to a process that is being torn down, or to a forked child.
  if (thread_.joinable()) thread_.detach();
}

void Engine::post(Task task, std::shared_ptr<Work> work) {
  {
    const std::lock_guard lock(mutex_);
    if (closing_ || left_) throw Error("comm_core was finalized");
    tasks_.push_back({std::move(task), std::move(work)});
  }
  driver_->wake();
}

bool Engine::stop(std::chrono::milliseconds patience) {
  if (!thread_.joinable()) return true;
  std::unique_lock lock(mutex_);
  stopping_ = true;
  driver_->wake();
  // After `patience` only a driver that is closing is waited for.
  const bool drained = settled_.wait_for(lock, patience, [this] { return left_ || closing_; });
  if (!drained) return false;
  settled_.wait(lock, [this] { return left_; });
  lock.unlock();
  thread_.join();
  if (failure_) std::rethrow_exception(failure_);
  return true;
}

bool Engine::run_tasks() {
  std::deque<Job> ready;
  {
    const std::lock_guard lock(mutex_);
    ready.swap(tasks_);
  }
  for (auto& [task, work] : ready) {
    try {
      task();
    } catch (...) {
      driver_->fail(std::current_exception());
      if (work) work->finish(std::current_exception());
    }
  }
  return !ready.empty();
}

void Engine::run() {
  id_ = std::this_thread::get_id();
  pthread_setname_np(pthread_self(), "comm_core");
  // Inherited, too: where subnormal numbers are flushed on some ranks only, sums would differ between ranks.
  std::fesetenv(FE_DFL_ENV);
  prctl(PR_SET_TIMERSLACK, 1000UL);  // naps are a few tens of microseconds; the default slack is 50
  try {
    driver_->open();
    std::fesetenv(FE_DFL_ENV);  // again: libraries that it has loaded may have set something else, as -ffast-math does
    {
      const std::lock_guard lock(mutex_);
      opened_ = true;
    }
    settled_.notify_all();
    for (;;) {
      const bool ran = run_tasks();
      const bool moved = driver_->progress();
      if (ran || moved) continue;
      {
        const std::lock_guard lock(mutex_);
        if (!tasks_.empty()) continue;
        if (stopping_ && driver_->drained()) {
          closing_ = true;
          break;
        }
      }
      driver_->wait();
    }
    settled_.notify_all();
    driver_->close();
  } catch (...) {
    const std::lock_guard lock(mutex_);
    failure_ = std::current_exception();
  }
  id_ = std::thread::id();
  {
    const std::lock_guard lock(mutex_);
    left_ = true;
  }
  settled_.notify_all();
}

}  // namespace comm_core
