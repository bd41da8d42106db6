// One NCCL communicator with a stream of its own.
#pragma once

#include <chrono>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../cuda/device.hpp"
#include "comm_core/operation.hpp"
#include "comm_core/work.hpp"
#include "nccl_api.hpp"

namespace comm_core {

/// [Note: who waits for whom] An operation follows, on the group's stream, what the streams of its buffers had been
/// given when it was submitted, and is followed by whatever stream Work::order_before names. All of that is events: no
/// host thread waits.
///
///   stream of the buffers   | kernel ─┐                          ┌─ kernel |
///   stream of the group               └─▶ | NCCL operation | ────┘
///                                     [1]                  [2]
///   [1] an event recorded by submit()   [2] an event recorded by submit(), waited for by order_before()
///
/// Memory is held until the device has passed [2]; whoever submits, waits or watches next notices.
class NcclGroup : public std::enable_shared_from_this<NcclGroup> {
 public:
  /// Takes `comm` over. The device has to be current.
  NcclGroup(const NcclApi& nccl, std::shared_ptr<const Device> device, NcclComm comm);
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  ~NcclGroup();

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  int device() const noexcept { return device_->number(); }

  /// On the caller's thread. Throws Unsupported before anything is enqueued, and what NCCL or the device said.
  void submit(Operation operation, const std::shared_ptr<Work>& work, KeepAlive memory);
  /// Finishes what the device has carried out. Any thread; never blocks.
  void poll() noexcept;
  /// poll(), and asks NCCL for errors; a group that failed is aborted. The watching thread's.
  void watch() noexcept;
  /// Everything under way fails with what `cause` says; later calls throw it. Any thread; never blocks.
  void fail(std::exception_ptr cause) noexcept;
  /// Nothing is under way, and no memory is held.
  bool idle();
  /// Closed, NCCL's communicator destroyed or aborted, and no memory held any more.
  bool over();

  /// Both block until the other ranks come along: the clerk's.
  std::shared_ptr<NcclGroup> split(std::optional<int> color, int key);
  void close();

 private:
  struct Entry {
    std::shared_ptr<Work> work;
    std::shared_ptr<const Moment> done;
    KeepAlive memory;
  };
  class Enqueued;

  void follow(const std::vector<std::uintptr_t>& streams);
  void require_unfailed();
  void abort() noexcept;
  void release_condemned() noexcept;
  void drain();

  const NcclApi& nccl_;
  const std::shared_ptr<const Device> device_;
  const int rank_, size_;
  CudaStream stream_;
  CudaAddress scratch_;  // the device's

  std::timed_mutex issuing_;  // one thread at a time calls NCCL for this communicator
  std::optional<Moment> entry_;

  std::mutex mutex_;  // guards what follows; never held while NCCL may wait for other ranks
  NcclComm comm_;     // null once it was aborted or destroyed
  std::deque<Entry> outstanding_;
  std::vector<Entry> condemned_;  // failed, and perhaps still read or written by the device
  std::exception_ptr failure_;
  bool closed_ = false;
};

}  // namespace comm_core
