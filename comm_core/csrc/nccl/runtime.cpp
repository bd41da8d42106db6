#include "runtime.hpp"

#include <algorithm>
#include <utility>

#include "comm_core/errors.hpp"
#include "comm_core/process.hpp"
#include "comm_core/settings.hpp"

namespace comm_core {
namespace {

/// The calling threads' side of a group.
class NcclBackend final : public Backend {
 public:
  NcclBackend(NcclRuntime& runtime, std::shared_ptr<NcclGroup> group) : runtime_(runtime), group_(std::move(group)) {}

  int rank() const noexcept override { return group_->rank(); }
  int size() const noexcept override { return group_->size(); }
  std::string name() const override { return "nccl"; }
  std::optional<int> device() const noexcept override { return group_->device(); }

  void submit(Operation operation, std::shared_ptr<Work> work, KeepAlive memory) override {
    group_->poll();  // lets go of what earlier operations held
    group_->submit(std::move(operation), work, std::move(memory));
  }
  Birth split(std::optional<int> color, int key, std::shared_ptr<Work> work) override {
    return runtime_.split(group_, color, key, std::move(work));
  }
  void post(int, std::string, std::shared_ptr<Work>) override { refuse_letters(); }
  std::optional<Letter> receive_post(std::chrono::duration<double>, const std::function<void()>&) override {
    refuse_letters();
  }
  void abandon(std::shared_ptr<Work> work) override {
    group_->fail(std::make_exception_ptr(
        TransportError("given up: other ranks never issued it, and all close the communicator")));
    work->finish();  // the watching thread aborts NCCL's communicator, which needs no other rank
  }
  void close(std::shared_ptr<Work> work) override { runtime_.close(group_, std::move(work)); }

 private:
  [[noreturn]] static void refuse_letters() {
    throw Unsupported("NCCL has no mailbox; post through the host's communicator");
  }

  NcclRuntime& runtime_;
  const std::shared_ptr<NcclGroup> group_;
};

}  // namespace

class NcclRuntime::Watch final : public NappingDriver {
 public:
  explicit Watch(NcclRuntime& runtime) : runtime_(runtime) {}
  void open() override {}
  bool progress() override {
    busy_ = false;
    for (const auto& group : runtime_.groups()) {
      group->watch();
      busy_ |= !group->idle();
    }
    runtime_.forget_closed();
    return false;
  }
  std::chrono::microseconds nap() override { return std::chrono::milliseconds(busy_ ? 5 : 20); }
  void fail(std::exception_ptr) override {}
  bool drained() override { return true; }
  void close() override {}

 private:
  NcclRuntime& runtime_;
  bool busy_ = false;
};

/// Its tasks tell their own errors.
class NcclRuntime::Clerk final : public NappingDriver {
 public:
  void open() override {}
  bool progress() override { return false; }
  std::chrono::microseconds nap() override { return std::chrono::seconds(1); }
  void fail(std::exception_ptr) override {}
  bool drained() override { return true; }
  void close() override {}
};

void NcclRuntime::load(const std::string& nccl_path, const std::string& cuda_path) {
  require_parent_process();
  watch_forks();
  const std::lock_guard lock(mutex_);
  if (nccl_) {
    if (nccl_->path() == nccl_path && cuda_->path() == cuda_path) return;
    throw InvalidUsage("NCCL was loaded from " + nccl_->path() + " already; it cannot be loaded from " + nccl_path +
                       " too");
  }
  auto nccl = std::make_unique<NcclApi>(nccl_path);
  cuda_ = std::make_unique<CudaDriver>(cuda_path);
  nccl_ = std::move(nccl);
}

void NcclRuntime::require_device(int number) {
  const std::lock_guard lock(mutex_);
  if (!cuda_) throw Error("load() comes first");
  if (number >= 0 && number < cuda_->num_devices()) return;
  throw Unsupported("there is no CUDA device " + std::to_string(number) + "; " + std::to_string(cuda_->num_devices()) +
                    " can be seen");
}

UniqueId NcclRuntime::unique_id() {
  const std::lock_guard lock(mutex_);
  if (!nccl_) throw Error("load() comes first");
  return nccl_->unique_id();
}

Birth NcclRuntime::join(const UniqueId& id, int rank, int size, int number, std::shared_ptr<Work> work) {
  require_device(number);
  if (size < 1 || rank < 0 || rank >= size) {
    throw InvalidUsage("nccl: rank " + std::to_string(rank) + " is not a rank of 0.." + std::to_string(size - 1));
  }
  start();
  return bear(std::move(work), [this, id, rank, size, number] {
    const auto on = device(number);
    const Device::Current current(*on);
    return std::make_shared<NcclGroup>(*nccl_, on, nccl_->init_rank(size, id, rank));
  });
}

Birth NcclRuntime::connect(std::optional<std::intptr_t>, std::shared_ptr<Work>) {
  throw Unsupported("NCCL cannot find other processes by itself; comm_core.nccl() takes what they exchanged");
}

Birth NcclRuntime::split(std::shared_ptr<NcclGroup> group, std::optional<int> color, int key,
                         std::shared_ptr<Work> work) {
  return bear(std::move(work), [group = std::move(group), color, key] { return group->split(color, key); });
}

Birth NcclRuntime::bear(std::shared_ptr<Work> work, std::function<std::shared_ptr<NcclGroup>()> make) {
  Birth birth{work};
  const auto clerk = this->clerk();
  if (!clerk) throw Error("comm_core was finalized");
  clerk->post([this, work = std::move(work), slot = birth.backend, make = std::move(make)] {
    std::exception_ptr error;
    try {
      if (auto group = make()) {
        *slot = std::make_unique<NcclBackend>(*this, group);
        const std::lock_guard lock(mutex_);
        groups_.push_back(std::move(group));
      }
    } catch (...) {
      error = std::current_exception();
    }
    work->finish(error);
  });
  return birth;
}

void NcclRuntime::close(std::shared_ptr<NcclGroup> group, std::shared_ptr<Work> work) {
  const auto task = [group = std::move(group), work] {
    std::exception_ptr error;
    try {
      group->close();
    } catch (...) {
      error = std::current_exception();
    }
    work->finish(error);
  };
  const auto clerk = this->clerk();
  if (!clerk) {
    work->finish();  // finalize() closed everything
    return;
  }
  try {
    clerk->post(task);
  } catch (const Error&) {
    work->finish();  // finalize() has come in between
  }
}

void NcclRuntime::start() {
  const std::lock_guard lock(mutex_);
  require_parent_process();
  if (stuck_) throw Unsupported("comm_core was finalized while operations over NCCL were unfinished; end this process");
  if (clerk_) return;
  clerk_ = std::make_shared<Engine>(std::make_unique<Clerk>());
  watch_ = std::make_shared<Engine>(std::make_unique<Watch>(*this));
}

std::shared_ptr<Engine> NcclRuntime::clerk() const {
  const std::lock_guard lock(mutex_);
  return clerk_;
}

std::shared_ptr<const Device> NcclRuntime::device(int number) {
  const std::lock_guard lock(mutex_);
  auto& found = devices_[number];
  if (!found) found = std::make_shared<Device>(*cuda_, number);
  return found;
}

std::vector<std::shared_ptr<NcclGroup>> NcclRuntime::groups() const {
  const std::lock_guard lock(mutex_);
  return groups_;
}

void NcclRuntime::forget_closed() {
  std::vector<std::shared_ptr<NcclGroup>> closed;  // let go without the lock
  const std::lock_guard lock(mutex_);
  for (const auto& group : groups_) {
    if (group->over()) closed.push_back(group);
  }
  std::erase_if(groups_, [&](const auto& group) { return std::ranges::find(closed, group) != closed.end(); });
}

void NcclRuntime::finalize() {
  if (in_forked_child()) return;
  std::shared_ptr<Engine> clerk, watch;
  {
    const std::lock_guard lock(mutex_);
    clerk = std::exchange(clerk_, nullptr);
    watch = std::exchange(watch_, nullptr);
  }
  if (!clerk) return;
  const auto left = std::make_shared<Work>("close", "nccl", "", 0);
  clerk->post([this, left] {
    std::exception_ptr error;
    for (const auto& group : groups()) {
      try {
        group->close();
      } catch (...) {
        error = std::current_exception();
      }
    }
    left->finish(error);
  });
  if (!clerk->stop(settings().exit_patience)) {
    const std::lock_guard lock(mutex_);
    stuck_ = {clerk, watch};
    throw TimeoutError("operations over NCCL were still unfinished " +
                       std::to_string(settings().exit_patience.count()) +
                       " s after shutdown began (COMM_CORE_EXIT_SECONDS)");
  }
  watch->stop(settings().exit_patience);
  if (const auto error = left->error()) std::rethrow_exception(error);
}

bool NcclRuntime::abort(int) noexcept { return false; }

std::map<std::string, std::string> NcclRuntime::describe() const {
  const std::lock_guard lock(mutex_);
  if (!nccl_) return {};
  return {{"nccl_library", nccl_->path()},
          {"nccl_version", std::to_string(nccl_->version())},
          {"cuda_driver", cuda_->path()},
          {"cuda_driver_version", std::to_string(cuda_->version())}};
}

}  // namespace comm_core
