#include "comm_core/process.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "comm_core/errors.hpp"

namespace comm_core {
namespace {

std::atomic<bool> forked{false};

/// Never destroyed: threads may come here until the process ends.
struct Descriptors {
  std::mutex mutex;  // held while the process forks
  std::vector<int> fds;
};

Descriptors& descriptors() {
  static auto* const instance = new Descriptors;
  return *instance;
}

void in_child() {
  forked.store(true);
  for (const int fd : descriptors().fds) ::close(fd);
  descriptors().fds.clear();
  descriptors().mutex.unlock();
}

}  // namespace

void watch_forks() noexcept {
  static const int installed =
      pthread_atfork([] { descriptors().mutex.lock(); }, [] { descriptors().mutex.unlock(); }, in_child);
  static_cast<void>(installed);
}

void close_in_children(int fd) {
  watch_forks();
  const std::lock_guard lock(descriptors().mutex);
  descriptors().fds.push_back(fd);
}

void keep_in_children(int fd) noexcept {
  const std::lock_guard lock(descriptors().mutex);
  std::erase(descriptors().fds, fd);
}

bool in_forked_child() noexcept { return forked.load(std::memory_order_relaxed); }

void require_parent_process() {
  if (in_forked_child()) {
    throw Error("comm_core cannot be used in a forked child: its engine thread lives in the parent only");
  }
}

}  // namespace comm_core
