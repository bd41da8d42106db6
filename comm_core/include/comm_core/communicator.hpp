// The communicator: validates on the calling thread, then hands over to a backend.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm_core/backend.hpp"

namespace [[gnu::visibility("default")]] comm_core {

using Counts = std::optional<std::vector<std::int64_t>>;
using WorkPtr = std::shared_ptr<Work>;
using Interrupted = std::function<void()>;

/// fp32 memory beside what travels in 16 bits.
struct WideBuffers {
  std::optional<Buffer> send, recv;
};

class Communicator;

/// An operation whose arguments were checked, for any number of submissions (MPI 4.0, persistent collective
/// operations). Keeps its memory and its communicator alive.
class Persistent {
 public:
  Persistent(std::shared_ptr<Communicator> communicator, Operation operation, std::vector<Buffer> buffers,
             KeepAlive memory, std::int64_t bytes);

  const Communicator& communicator() const noexcept { return *communicator_; }
  /// One more operation, in the order of the calls like any other.
  WorkPtr start() const&;
  /// The only one: nothing is kept.
  WorkPtr start() &&;

 private:
  std::shared_ptr<Communicator> communicator_;
  Operation operation_;
  std::vector<Buffer> buffers_;
  KeepAlive memory_;
  std::int64_t bytes_;
};

/// A group of ranks. Every operation returns at once with its Work; operations of one communicator run in the order of
/// their calls, which must be the same on all ranks. `memory` keeps the buffers alive until the engine is done.
/// Arguments that do not fit raise InvalidUsage or Unsupported before anything is sent. One that is dropped without
/// close() is closed all the same, without waiting.
///
/// 16-bit elements may have fp32 ones beside them: `wide.send` is rounded into `send` first, and `wide.recv` gets what
/// `recv` has in the end, both on the thread that moves the bytes.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  /// `levels`: how its operations are carried out; null: all ranks are alike.
  Communicator(std::unique_ptr<Backend> backend, std::string name, std::shared_ptr<const Levels> levels = nullptr);

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  /// The shard of this rank in reduce_scatter and all_gather, and how many there are: rank() and size(), but of a
  /// communicator with Levels of kind kHybrid.
  int shard_rank() const noexcept { return shard_rank_; }
  int shard_size() const noexcept { return shard_size_; }
  const std::string& name() const noexcept { return name_; }
  /// The CUDA device whose memory it moves; none: host memory.
  std::optional<int> device() const noexcept { return device_; }
  std::string backend() const { return backend_->name(); }

  WorkPtr reduce_scatter(Buffer send, Buffer recv, ReduceOp op, const Counts& counts, const WideBuffers& wide,
                         std::string label, KeepAlive memory);
  WorkPtr all_gather(Buffer send, Buffer recv, const Counts& counts, const WideBuffers& wide, std::string label,
                     KeepAlive memory);
  WorkPtr all_reduce(Buffer send, Buffer recv, ReduceOp op, std::string label, KeepAlive memory);
  WorkPtr broadcast(Buffer buffer, int root, std::string label, KeepAlive memory);
  WorkPtr reduce(Buffer send, std::optional<Buffer> recv, ReduceOp op, int root, std::string label, KeepAlive memory);
  WorkPtr all_to_all(Buffer send, Buffer recv, const Counts& send_counts, const Counts& recv_counts, std::string label,
                     KeepAlive memory);
  WorkPtr send(Buffer buffer, int peer, int tag, std::string label, KeepAlive memory);
  WorkPtr receive(Buffer buffer, int peer, int tag, std::string label, KeepAlive memory);
  WorkPtr barrier(std::string label);

  /// The operation of that name, to be issued later and as often as one likes.
  Persistent reduce_scatter_init(Buffer send, Buffer recv, ReduceOp op, const Counts& counts, const WideBuffers& wide,
                                 std::string label, KeepAlive memory);
  Persistent all_gather_init(Buffer send, Buffer recv, const Counts& counts, const WideBuffers& wide, std::string label,
                             KeepAlive memory);
  Persistent all_reduce_init(Buffer send, Buffer recv, ReduceOp op, std::string label, KeepAlive memory);

  /// Every rank's `send_count`, in rank order. Collective and blocking.
  std::vector<std::int64_t> all_gather_counts(std::int64_t send_count, const Interrupted& interrupted);
  /// Collective and blocking. Null on ranks without a color.
  std::shared_ptr<Communicator> split(std::optional<int> color, int key, const Interrupted& interrupted);
  /// A communicator of these `ranks`, in this order, over the connections that there are. On every one of them, and on
  /// no other; no rank waits for another. Throws Unsupported where a backend cannot do without that.
  std::shared_ptr<Communicator> part(std::vector<int> ranks, std::string name, const Interrupted& interrupted);
  /// Collective and blocking: a communicator of the same ranks with these `levels`. Throws InvalidUsage, the same on
  /// all ranks, where they differ or are no groups of equal size; Unsupported where it moves a device's memory.
  std::shared_ptr<Communicator> with(Levels levels, const Interrupted& interrupted);
  WorkPtr post(int peer, std::string payload);
  std::optional<Letter> receive_post(std::chrono::duration<double> timeout, const Interrupted& interrupted);
  /// Unfinished works, oldest first.
  std::vector<WorkPtr> pending();
  /// Collective, where some ranks have submitted operations that others never will: ends those with a TransportError,
  /// here and on the other ranks. Only close() may follow.
  void abandon(const Interrupted& interrupted);
  /// Waits for everything that was submitted. Idempotent.
  void close(const Interrupted& interrupted);

 private:
  friend class Persistent;
  WorkPtr submit(Operation operation, std::span<const Buffer> buffers, KeepAlive memory, std::int64_t bytes);
  WorkPtr submit(Operation operation, std::initializer_list<Buffer> buffers, KeepAlive memory, std::int64_t bytes) {
    return submit(std::move(operation), std::span(buffers.begin(), buffers.size()), std::move(memory), bytes);
  }
  /// Every rank's numbers, `counts` of them, without Levels. Blocking.
  std::vector<std::int64_t> gather(const std::vector<std::int64_t>& mine, const std::vector<std::int64_t>& counts,
                                   const std::string& label, const Interrupted& interrupted);
  /// What split() gives, and its name with this ending.
  std::pair<std::unique_ptr<Backend>, std::string> divide(std::optional<int> color, int key, const std::string& ending,
                                                          const Interrupted& interrupted);
  WorkPtr track(WorkPtr work);
  WorkPtr new_work(const Operation& operation, std::int64_t bytes) const;
  void require_open() const;

  std::unique_ptr<Backend> backend_;
  const std::string name_;
  const std::shared_ptr<const Levels> levels_;
  const int rank_, size_;
  const int shard_rank_, shard_size_;
  const std::optional<int> device_;
  std::mutex unfinished_mutex_;  // never held while a backend is called: a watchdog looks while others submit
  static constexpr std::size_t kTidyAt = 32;
  std::vector<WorkPtr> unfinished_;  // and some that are finished
  std::size_t tidy_at_ = kTidyAt;
  std::mutex mutex_;  // guards the order of submission and the fields below
  int num_splits_ = 0;
  std::atomic<bool> closed_{false};  // read without the lock, too
};

/// The communicator of a registered provider; blocks until all its processes called.
std::shared_ptr<Communicator> connect(const std::string& provider, std::optional<std::intptr_t> handle,
                                      const Interrupted& interrupted);

}  // namespace comm_core
