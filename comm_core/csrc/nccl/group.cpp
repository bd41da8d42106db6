#include "group.hpp"

#include <algorithm>
#include <thread>
#include <utility>

#include "comm_core/errors.hpp"
#include "comm_core/process.hpp"
#include "enqueue.hpp"
#include "failure.hpp"

namespace comm_core {
namespace {

/// A call of NCCL's that waits for a rank that will not come ends only when the communicator is aborted under it.
constexpr std::chrono::seconds kPatienceWithCaller{2};
constexpr std::chrono::milliseconds kDrainNap{1};

CudaStream as_stream(std::uintptr_t handle) { return reinterpret_cast<CudaStream>(handle); }

}  // namespace

/// What the caller's Work knows of an operation that was enqueued.
class NcclGroup::Enqueued final : public Completion {
 public:
  Enqueued(std::shared_ptr<NcclGroup> group, std::shared_ptr<const Moment> done)
      : group_(std::move(group)), done_(std::move(done)) {}

  void poll() noexcept override { group_->poll(); }
  void order_before(std::uintptr_t stream) override {
    const Device::Current current(done_->device());
    done_->device().driver().wait(as_stream(stream), done_->event());
  }

 private:
  const std::shared_ptr<NcclGroup> group_;
  const std::shared_ptr<const Moment> done_;
};

NcclGroup::NcclGroup(const NcclApi& nccl, std::shared_ptr<const Device> device, NcclComm comm)
    : nccl_(nccl),
      device_(std::move(device)),
      rank_(nccl.rank(comm)),
      size_(nccl.size(comm)),
      stream_(device_->driver().create_stream()),
      scratch_(device_->scratch()),
      entry_(std::in_place, device_),
      comm_(comm) {}

void NcclGroup::submit(Operation operation, const std::shared_ptr<Work>& work, KeepAlive memory) {
  require_supported(operation, rank_);
  const std::lock_guard issuing(issuing_);
  require_unfailed();
  const Device::Current current(*device_);
  follow(operation.after);
  Entry entry{work, std::make_shared<Moment>(device_), std::move(memory)};
  try {
    enqueue(nccl_, comm_, operation, rank_, size_, stream_, scratch_);
    device_->driver().record(entry.done->event(), stream_);
  } catch (const TransportError&) {
    const auto error = attributed(std::current_exception(), work->title());
    {
      // Part of it may have been enqueued: its memory is let go when the communicator was aborted.
      const std::lock_guard lock(mutex_);
      condemned_.push_back(std::move(entry));
    }
    fail(error);
    std::rethrow_exception(error);
  }
  work->attach(std::make_shared<Enqueued>(shared_from_this(), entry.done));
  {
    const std::lock_guard lock(mutex_);
    if (!failure_) {
      outstanding_.push_back(std::move(entry));
      return;
    }
    condemned_.push_back(std::move(entry));
  }
  require_unfailed();
}

void NcclGroup::follow(const std::vector<std::uintptr_t>& streams) {
  const auto& driver = device_->driver();
  for (const auto stream : streams) {
    if (driver.is_capturing(as_stream(stream))) {
      throw Unsupported(
          "operations over NCCL cannot be captured into a CUDA graph yet: nobody could tell when a replay of one is "
          "done; issue them outside the capture");
    }
  }
  for (const auto stream : streams) {
    driver.record(entry_->event(), as_stream(stream));
    driver.wait(stream_, entry_->event());
  }
}

void NcclGroup::require_unfailed() {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(attributed(failure_, "this communicator was aborted after an error"));
  if (comm_ == nullptr) throw Error("this communicator was closed");
}

void NcclGroup::poll() noexcept {
  if (in_forked_child()) return;
  std::vector<Entry> finished;
  try {
    const Device::Current current(*device_);
    const std::lock_guard lock(mutex_);
    while (!outstanding_.empty() && device_->driver().is_done(outstanding_.front().done->event())) {
      finished.push_back(std::move(outstanding_.front()));
      outstanding_.pop_front();
    }
  } catch (...) {
    fail(std::current_exception());
  }
  for (auto& entry : finished) {
    entry.memory.reset();
    entry.work->finish();
  }
}

void NcclGroup::fail(std::exception_ptr cause) noexcept {
  std::vector<std::shared_ptr<Work>> works;
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = cause;
    for (auto& entry : outstanding_) {
      works.push_back(entry.work);
      condemned_.push_back(std::move(entry));
    }
    outstanding_.clear();
  }
  for (const auto& work : works) work->finish(attributed(cause, work->title()));
}

void NcclGroup::watch() noexcept {
  poll();
  std::optional<std::pair<int, std::string>> error;
  bool failed = false;
  {
    const std::lock_guard lock(mutex_);
    if (comm_ != nullptr && !failure_) error = nccl_.async_error(comm_);
    failed = failure_ != nullptr;
  }
  if (error) {
    const std::string who = "rank " + std::to_string(rank_) + " of " + std::to_string(size_);
    fail(std::make_exception_ptr(NcclError(who + " was told by NCCL: " + error->second, error->first)));
  }
  if (error || failed) {
    abort();
    release_condemned();
  }
}

void NcclGroup::abort() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return;
  }
  // Not while another thread calls NCCL for this communicator, unless that thread will never come back.
  const std::unique_lock<std::timed_mutex> issuing(issuing_, kPatienceWithCaller);
  NcclComm comm = nullptr;
  {
    const std::lock_guard lock(mutex_);
    comm = std::exchange(comm_, nullptr);
  }
  if (comm == nullptr) return;
  try {
    const Device::Current current(*device_);
    nccl_.abort(comm);
  } catch (const CudaError&) {  // the device is gone, and with it what was to be aborted
  }
}

void NcclGroup::release_condemned() noexcept {
  std::vector<Entry> released;  // let go without the lock
  const std::lock_guard lock(mutex_);
  const auto is_over = [this](const Entry& entry) {
    try {
      const Device::Current current(*device_);
      return device_->driver().is_done(entry.done->event());
    } catch (const CudaError&) {
      return true;  // a device that failed runs nothing any more
    }
  };
  const auto kept = std::stable_partition(condemned_.begin(), condemned_.end(), std::not_fn(is_over));
  released.assign(std::make_move_iterator(kept), std::make_move_iterator(condemned_.end()));
  condemned_.erase(kept, condemned_.end());
}

bool NcclGroup::idle() {
  const std::lock_guard lock(mutex_);
  return outstanding_.empty() && condemned_.empty();
}

bool NcclGroup::over() {
  const std::lock_guard lock(mutex_);
  return closed_ && comm_ == nullptr && condemned_.empty();
}

void NcclGroup::drain() {
  for (;;) {
    poll();
    {
      const std::lock_guard lock(mutex_);
      if (outstanding_.empty()) return;
    }
    std::this_thread::sleep_for(kDrainNap);
  }
}

std::shared_ptr<NcclGroup> NcclGroup::split(std::optional<int> color, int key) {
  // NCCL may deadlock when it splits a communicator with operations under way.
  const std::lock_guard issuing(issuing_);
  drain();
  require_unfailed();
  const Device::Current current(*device_);
  const NcclComm part = nccl_.split(comm_, color, key);
  return part == nullptr ? nullptr : std::make_shared<NcclGroup>(nccl_, device_, part);
}

void NcclGroup::close() {
  drain();
  const std::lock_guard issuing(issuing_);
  NcclComm comm = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true) || failure_) return;
    comm = std::exchange(comm_, nullptr);
  }
  const Device::Current current(*device_);
  if (comm != nullptr) nccl_.destroy(comm);
}

NcclGroup::~NcclGroup() {
  if (in_forked_child()) return;
  try {
    const Device::Current current(*device_);
    entry_.reset();
    device_->driver().destroy(stream_);
  } catch (const CudaError&) {  // a device that failed keeps nothing
  }
}

}  // namespace comm_core
