#include "comm_core/communicator.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "comm_core/errors.hpp"
#include "comm_core/process.hpp"
#include "comm_core/settings.hpp"
#include "layout.hpp"
#include "validation.hpp"

namespace comm_core {
namespace {

/// Gives the work to a backend; one that is refused is not under way.
template <class Call>
void hand_over(Work& work, const Call& call) {
  try {
    call();
  } catch (...) {
    work.finish(std::current_exception());
    throw;
  }
}

bool is_hybrid(const std::shared_ptr<const Levels>& levels) {
  return levels != nullptr && levels->kind == Levels::Kind::kHybrid;
}

}  // namespace

Communicator::Communicator(std::unique_ptr<Backend> backend, std::string name, std::shared_ptr<const Levels> levels)
    : backend_(std::move(backend)),
      name_(std::move(name)),
      levels_(std::move(levels)),
      rank_(backend_->rank()),
      size_(backend_->size()),
      shard_rank_(is_hybrid(levels_) ? levels_->member_of(rank_) : rank_),
      shard_size_(is_hybrid(levels_) ? levels_->group_size() : size_),
      device_(backend_->device()) {
  watch_forks();
}

Persistent::Persistent(std::shared_ptr<Communicator> communicator, Operation operation, std::vector<Buffer> buffers,
                       KeepAlive memory, std::int64_t bytes)
    : communicator_(std::move(communicator)),
      operation_(std::move(operation)),
      buffers_(std::move(buffers)),
      memory_(std::move(memory)),
      bytes_(bytes) {}

WorkPtr Persistent::start() const& { return communicator_->submit(operation_, buffers_, memory_, bytes_); }

WorkPtr Persistent::start() && {
  return communicator_->submit(std::move(operation_), buffers_, std::move(memory_), bytes_);
}

WorkPtr Communicator::reduce_scatter(Buffer send, Buffer recv, ReduceOp op, const Counts& counts,
                                     const WideBuffers& wide, std::string label, KeepAlive memory) {
  return reduce_scatter_init(send, recv, op, counts, wide, std::move(label), std::move(memory)).start();
}

WorkPtr Communicator::all_gather(Buffer send, Buffer recv, const Counts& counts, const WideBuffers& wide,
                                 std::string label, KeepAlive memory) {
  return all_gather_init(send, recv, counts, wide, std::move(label), std::move(memory)).start();
}

WorkPtr Communicator::all_reduce(Buffer send, Buffer recv, ReduceOp op, std::string label, KeepAlive memory) {
  return all_reduce_init(send, recv, op, std::move(label), std::move(memory)).start();
}

Persistent Communicator::reduce_scatter_init(Buffer send, Buffer recv, ReduceOp op, const Counts& counts,
                                             const WideBuffers& wide, std::string label, KeepAlive memory) {
  const Checks check{"reduce_scatter", shard_rank_, shard_size_, device_, is_hybrid(levels_) ? "shard" : "rank"};
  check.placed(send, "send");
  check.placed(recv, "recv");
  check.same_dtype(send, recv);
  check.writable(recv, "recv");
  check.supports(send.dtype, op);
  Operation o{OpKind::kReduceScatter, send.dtype, op, send.data, recv.data, send.count, {}, {}, 0, 0, std::move(label)};
  o.recv_counts = check.chunks(counts, send.count, "counts", "send");
  check.chunk_fits(recv, o.recv_counts, "recv");
  check.disjoint(send, recv);
  o.wide = check.wide(wide, send, recv);
  o.levels = levels_;
  return {shared_from_this(), std::move(o), {send, recv}, std::move(memory), send.bytes()};
}

Persistent Communicator::all_gather_init(Buffer send, Buffer recv, const Counts& counts, const WideBuffers& wide,
                                         std::string label, KeepAlive memory) {
  const Checks check{"all_gather", shard_rank_, shard_size_, device_, is_hybrid(levels_) ? "shard" : "rank"};
  check.placed(send, "send");
  check.placed(recv, "recv");
  check.same_dtype(send, recv);
  check.writable(recv, "recv");
  Operation o{OpKind::kAllGather, send.dtype, ReduceOp::kSum, send.data, recv.data, recv.count, {}, {}, 0, 0,
              std::move(label)};
  o.recv_counts = check.chunks(counts, recv.count, "counts", "recv");
  check.chunk_fits(send, o.recv_counts, "send");
  check.own_chunk_or_disjoint(send, recv, o.recv_counts);
  o.wide = check.wide(wide, send, recv);
  o.levels = levels_;
  return {shared_from_this(), std::move(o), {send, recv}, std::move(memory), recv.bytes()};
}

Persistent Communicator::all_reduce_init(Buffer send, Buffer recv, ReduceOp op, std::string label, KeepAlive memory) {
  const Checks check{"all_reduce", rank_, size_, device_};
  check.placed(send, "send");
  check.placed(recv, "recv");
  check.same_dtype(send, recv);
  check.writable(recv, "recv");
  check.supports(send.dtype, op);
  check.same_count(send, recv);
  check.same_or_disjoint(send, recv);
  Operation o{OpKind::kAllReduce, send.dtype, op, send.data, recv.data, send.count, {}, {}, 0, 0, std::move(label)};
  o.recv_counts = balanced_counts(send.count, size_);
  o.levels = levels_;
  return {shared_from_this(), std::move(o), {send, recv}, std::move(memory), send.bytes()};
}

WorkPtr Communicator::broadcast(Buffer buffer, int root, std::string label, KeepAlive memory) {
  const Checks check{"broadcast", rank_, size_, device_};
  check.placed(buffer, "buffer");
  check.peer(root, "root");
  if (rank_ != root) check.writable(buffer, "buffer");
  Operation o{OpKind::kBroadcast, buffer.dtype, ReduceOp::kSum, nullptr, buffer.data, buffer.count, {}, {}, root, 0,
              std::move(label)};
  return submit(std::move(o), {buffer}, std::move(memory), buffer.bytes());
}

WorkPtr Communicator::reduce(Buffer send, std::optional<Buffer> recv, ReduceOp op, int root, std::string label,
                             KeepAlive memory) {
  const Checks check{"reduce", rank_, size_, device_};
  check.placed(send, "send");
  check.peer(root, "root");
  check.supports(send.dtype, op);
  if (rank_ == root) {
    if (!recv) throw InvalidUsage("reduce: the root (rank " + std::to_string(root) + ") needs a recv buffer");
    check.placed(*recv, "recv");
    check.same_dtype(send, *recv);
    check.writable(*recv, "recv");
    check.same_count(send, *recv);
    check.same_or_disjoint(send, *recv);
  }
  Operation o{OpKind::kReduce, send.dtype, op, send.data, rank_ == root ? recv->data : nullptr,
              send.count,      {},         {}, root,      0,
              std::move(label)};
  o.recv_counts = balanced_counts(send.count, size_);
  return submit(std::move(o), {send, recv.value_or(send)}, std::move(memory), send.bytes());
}

WorkPtr Communicator::all_to_all(Buffer send, Buffer recv, const Counts& send_counts, const Counts& recv_counts,
                                 std::string label, KeepAlive memory) {
  const Checks check{"all_to_all", rank_, size_, device_};
  check.placed(send, "send");
  check.placed(recv, "recv");
  check.same_dtype(send, recv);
  check.writable(recv, "recv");
  Operation o{OpKind::kAllToAll, send.dtype, ReduceOp::kSum, send.data, recv.data, send.count, {}, {}, 0, 0,
              std::move(label)};
  o.send_counts = check.parts(send_counts, send.count, "send_counts", "send");
  o.recv_counts = check.parts(recv_counts, recv.count, "recv_counts", "recv");
  const auto me = static_cast<std::size_t>(rank_);
  if (o.send_counts[me] != o.recv_counts[me]) {
    throw InvalidUsage("all_to_all: send_counts[" + std::to_string(rank_) + "] is " +
                       std::to_string(o.send_counts[me]) + " but recv_counts[" + std::to_string(rank_) + "] is " +
                       std::to_string(o.recv_counts[me]) + "; what a rank sends to itself it also receives");
  }
  check.disjoint(send, recv);
  return submit(std::move(o), {send, recv}, std::move(memory), send.bytes());
}

WorkPtr Communicator::send(Buffer buffer, int peer, int tag, std::string label, KeepAlive memory) {
  const Checks check{"send", rank_, size_, device_};
  check.placed(buffer, "buffer");
  check.peer(peer, "peer");
  check.tag(tag);
  Operation o{OpKind::kSend, buffer.dtype, ReduceOp::kSum,  buffer.data, nullptr, buffer.count, {}, {},
              peer,          tag,          std::move(label)};
  return submit(std::move(o), {buffer}, std::move(memory), buffer.bytes());
}

WorkPtr Communicator::receive(Buffer buffer, int peer, int tag, std::string label, KeepAlive memory) {
  const Checks check{"recv", rank_, size_, device_};
  check.placed(buffer, "buffer");
  check.peer(peer, "peer");
  check.tag(tag);
  check.writable(buffer, "buffer");
  Operation o{OpKind::kReceive, buffer.dtype, ReduceOp::kSum, nullptr, buffer.data, buffer.count, {}, {}, peer, tag,
              std::move(label)};
  return submit(std::move(o), {buffer}, std::move(memory), buffer.bytes());
}

WorkPtr Communicator::barrier(std::string label) {
  Operation o;
  o.label = std::move(label);
  return submit(std::move(o), std::span<const Buffer>(), nullptr, 0);
}

WorkPtr Communicator::new_work(const Operation& o, std::int64_t bytes) const {
  std::string detail = std::to_string(o.count) + " x " + std::string(name_of(o.dtype)) + ", rank " +
                       std::to_string(rank_) + " of " + std::to_string(size_) + " on " + name_;
  return std::make_shared<Work>(std::string(name_of(o.kind)), o.label, std::move(detail), bytes);
}

WorkPtr Communicator::track(WorkPtr work) {
  const std::lock_guard lock(unfinished_mutex_);
  // Looked through when it is twice as long as after the last time: however many there are, each costs the same.
  if (unfinished_.size() >= tidy_at_) {
    std::erase_if(unfinished_, [](const WorkPtr& w) { return w->known_done(); });
    tidy_at_ = std::max(kTidyAt, 2 * unfinished_.size());
  }
  unfinished_.push_back(work);
  return work;
}

void Communicator::require_open() const {
  require_parent_process();
  if (closed_) throw InvalidUsage("communicator " + name_ + " is closed");
}

WorkPtr Communicator::submit(Operation operation, std::span<const Buffer> buffers, KeepAlive memory,
                             std::int64_t bytes) {
  require_parent_process();
  if (device_) {
    for (const auto& buffer : buffers) {
      if (buffer.device && std::ranges::find(operation.after, buffer.stream) == operation.after.end())
        operation.after.push_back(buffer.stream);
    }
  }
  const std::lock_guard lock(mutex_);
  require_open();
  const auto work = track(new_work(operation, bytes));
  hand_over(*work, [&] { backend_->submit(std::move(operation), work, std::move(memory)); });
  return work;
}

std::vector<std::int64_t> Communicator::gather(const std::vector<std::int64_t>& mine,
                                               const std::vector<std::int64_t>& counts, const std::string& label,
                                               const Interrupted& interrupted) {
  struct Memory {
    std::vector<std::int64_t> mine, all;
  };
  const auto total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  const auto memory =
      std::make_shared<Memory>(Memory{mine, std::vector<std::int64_t>(static_cast<std::size_t>(total))});
  const Buffer send{reinterpret_cast<std::byte*>(memory->mine.data()), static_cast<std::int64_t>(mine.size()),
                    DType::kInt64};
  const Buffer recv{reinterpret_cast<std::byte*>(memory->all.data()), total, DType::kInt64};
  Operation o{OpKind::kAllGather, DType::kInt64, ReduceOp::kSum, send.data, recv.data, total, {}, counts, 0, 0, label};
  submit(std::move(o), {send, recv}, memory, recv.bytes())->wait(std::nullopt, interrupted);
  return memory->all;
}

std::vector<std::int64_t> Communicator::all_gather_counts(std::int64_t send_count, const Interrupted& interrupted) {
  if (device_) throw Unsupported("all_gather_counts: " + name_ + " moves no host memory; ask the host's communicator");
  return gather({send_count}, std::vector<std::int64_t>(static_cast<std::size_t>(size_), 1), "counts", interrupted);
}

std::pair<std::unique_ptr<Backend>, std::string> Communicator::divide(std::optional<int> color, int key,
                                                                      const std::string& ending,
                                                                      const Interrupted& interrupted) {
  require_parent_process();
  Birth birth;
  std::string name = name_ + "/";
  {
    const std::lock_guard lock(mutex_);
    require_open();
    name += std::to_string(num_splits_++) + ending;
    const auto work = track(std::make_shared<Work>("split", name, "rank " + std::to_string(rank_), 0));
    hand_over(*work, [&] { birth = backend_->split(color, key, work); });
  }
  birth.work->wait(std::nullopt, interrupted);
  return {std::move(*birth.backend), std::move(name)};
}

std::shared_ptr<Communicator> Communicator::split(std::optional<int> color, int key, const Interrupted& interrupted) {
  if (color && *color < 0) throw InvalidUsage("split: color must be None or >= 0, got " + std::to_string(*color));
  auto [backend, name] = divide(color, key, color ? ":" + std::to_string(*color) : "", interrupted);
  if (!backend) return nullptr;
  return std::make_shared<Communicator>(std::move(backend), std::move(name));
}

std::shared_ptr<Communicator> Communicator::part(std::vector<int> ranks, std::string name,
                                                 const Interrupted& interrupted) {
  const Checks check{"part", rank_, size_, device_};
  for (const int rank : ranks) {
    check.peer(rank, "a rank");
    if (std::ranges::count(ranks, rank) > 1) throw InvalidUsage("part: ranks have " + std::to_string(rank) + " twice");
  }
  if (std::ranges::find(ranks, rank_) == ranks.end()) {
    throw InvalidUsage("part: ranks do not have " + std::to_string(rank_) + ", this one");
  }
  require_parent_process();
  Birth birth;
  {
    const std::lock_guard lock(mutex_);
    require_open();
    const auto work = track(std::make_shared<Work>("part", name, "rank " + std::to_string(rank_) + " on " + name_, 0));
    hand_over(*work, [&] { birth = backend_->part(std::move(ranks), name, work); });
  }
  birth.work->wait(std::nullopt, interrupted);
  return std::make_shared<Communicator>(std::move(*birth.backend), name_ + "/" + name);
}

std::shared_ptr<Communicator> Communicator::with(Levels levels, const Interrupted& interrupted) {
  const std::string kind = levels.kind == Levels::Kind::kTwoLevel ? "two_level" : "hybrid";
  if (device_) throw Unsupported(kind + ": " + name_ + " moves no host memory; ask the host's communicator");
  const auto mine = levels.encoded();
  const auto counts = all_gather_counts(static_cast<std::int64_t>(mine.size()), interrupted);
  const auto all = gather(mine, counts, kind, interrupted);
  std::vector<std::vector<std::int64_t>> given;
  for (auto at = all.begin(); const auto count : counts) {
    given.emplace_back(at, at + count);
    at += count;
  }
  const auto trouble = trouble_with(given);
  if (!trouble.empty()) throw InvalidUsage(trouble);
  auto [backend, name] = divide(0, rank_, ":" + kind, interrupted);
  return std::make_shared<Communicator>(std::move(backend), std::move(name),
                                        std::make_shared<const Levels>(std::move(levels)));
}

WorkPtr Communicator::post(int peer, std::string payload) {
  const Checks check{"post", rank_, size_, device_};
  check.peer(peer, "peer");
  require_parent_process();
  const std::lock_guard lock(mutex_);
  require_open();
  const auto bytes = static_cast<std::int64_t>(payload.size());
  const auto work =
      track(std::make_shared<Work>("post", "", "to rank " + std::to_string(peer) + " on " + name_, bytes));
  hand_over(*work, [&] { backend_->post(peer, std::move(payload), work); });
  return work;
}

std::optional<Letter> Communicator::receive_post(std::chrono::duration<double> timeout,
                                                 const Interrupted& interrupted) {
  require_parent_process();  // before the lock, which a forked child may find taken for ever
  {
    const std::lock_guard lock(mutex_);
    require_open();
  }
  return backend_->receive_post(timeout, interrupted);
}

std::vector<WorkPtr> Communicator::pending() {
  if (in_forked_child()) return {};
  std::vector<WorkPtr> unfinished;
  {
    const std::lock_guard lock(unfinished_mutex_);
    unfinished = unfinished_;
  }
  std::erase_if(unfinished, [](const WorkPtr& w) { return w->done(); });
  return unfinished;
}

void Communicator::abandon(const Interrupted& interrupted) {
  if (in_forked_child()) return;
  WorkPtr work;
  {
    // A device's library may hold another thread inside submit() until other ranks come, and only this frees it.
    std::unique_lock lock(mutex_, std::defer_lock);
    if (!device_) lock.lock();
    require_open();
    work = track(std::make_shared<Work>("abandon", "", "rank " + std::to_string(rank_) + " on " + name_, 0));
    hand_over(*work, [&] { backend_->abandon(work); });
  }
  work->wait(std::nullopt, interrupted);
}

void Communicator::close(const Interrupted& interrupted) {
  if (in_forked_child()) return;
  WorkPtr work;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    work = track(std::make_shared<Work>("close", "", "rank " + std::to_string(rank_) + " on " + name_, 0));
    backend_->close(work);
  }
  work->wait(std::nullopt, interrupted);
}

std::shared_ptr<Communicator> connect(const std::string& provider, std::optional<std::intptr_t> handle,
                                      const Interrupted& interrupted) {
  require_parent_process();
  watch_forks();
  static_cast<void>(settings());
  auto* found = find_provider(provider);
  if (found == nullptr) throw Unsupported("no backend called '" + provider + "' is loaded");
  const Birth birth = found->connect(handle, std::make_shared<Work>("connect", provider, "", 0));
  birth.work->wait(std::nullopt, interrupted);
  return std::make_shared<Communicator>(std::move(*birth.backend), handle ? provider + "-comm" : provider + "-world");
}

}  // namespace comm_core
