#include "comm_core/process.hpp"

#include <pthread.h>

#include <atomic>

#include "comm_core/errors.hpp"

namespace comm_core {
namespace {

std::atomic<bool> forked{false};

}  // namespace

void watch_forks() noexcept {
  static const int installed = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
  static_cast<void>(installed);
}

bool in_forked_child() noexcept { return forked.load(std::memory_order_relaxed); }

void require_parent_process() {
  if (in_forked_child()) {
    throw Error("comm_core cannot be used in a forked child: its engine thread lives in the parent only");
  }
}

}  // namespace comm_core
