#include "planner.hpp"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "../signature.hpp"
#include "announced.hpp"
#include "broadcast.hpp"
#include "chain_reduce.hpp"
#include "exchange.hpp"
#include "levelled.hpp"
#include "message.hpp"
#include "ring.hpp"
#include "sequence.hpp"

namespace comm_core {
namespace {

using SchedulePtr = std::unique_ptr<Schedule>;

/// The operation, the group and the sizes in bytes, for the functions below.
struct Job {
  const Operation& op;
  int rank;
  int size;
  const Settings& settings;

  std::int64_t item() const { return static_cast<std::int64_t>(item_size(op.dtype)); }
  std::int64_t bytes() const { return op.count * item(); }
  std::int64_t chunk(int r) const { return op.recv_counts[static_cast<std::size_t>(r)] * item(); }
  std::int64_t before(int r) const {
    std::int64_t sum = 0;
    for (int i = 0; i < r; ++i) sum += chunk(i);
    return sum;
  }
  Pieces pieces() const { return {settings.segment_bytes, settings.window}; }
  /// For chains: segments small enough that all links are busy most of the time.
  Pieces chain_pieces() const {
    constexpr std::int64_t kSmallest = 8192, kLinksBusy = 8;
    const auto piece = std::max(kSmallest, bytes() / kLinksBusy / 8 * 8);
    return {std::min(piece, settings.segment_bytes), settings.window};
  }
  /// For talking to everybody at once: together the lanes keep no more in flight than one stream does.
  Pieces shared_pieces() const {
    return {settings.segment_bytes, std::max<std::int64_t>(2, settings.window / std::max(1, size - 1))};
  }

  /// The other ranks, nearest to the right first, so that not everybody begins with rank 0.
  template <class Make>
  std::vector<Lane> lanes(const Make& make) const {
    std::vector<Lane> all;
    for (int k = 1; k < size; ++k) {
      Lane lane = make((rank + k) % size);
      lane.peer = (rank + k) % size;
      all.push_back(lane);
    }
    return all;
  }
};

SchedulePtr ring(const Job& job, int steps, int first_shift, int reduce_steps, const std::byte* send, std::byte* recv) {
  RingTask task;
  task.plan = {job.rank,
               job.size,
               steps,
               first_shift,
               std::max<std::int64_t>(1, job.settings.segment_bytes / job.item()),
               job.settings.window,
               job.op.recv_counts,
               offsets_of(job.op.recv_counts)};
  task.reduce_steps = reduce_steps;
  task.dtype = job.op.dtype;
  task.op = job.op.reduce;
  task.send = send;
  task.recv = recv;
  return std::make_unique<Ring>(std::move(task));
}

SchedulePtr ring_all_gather(const Job& job, const std::byte* send, std::byte* recv) {
  return ring(job, job.size - 1, 0, 0, send, recv);
}

SchedulePtr reduce_scatter_to(const Job& job, std::byte* out) {
  const auto largest = *std::max_element(job.op.recv_counts.begin(), job.op.recv_counts.end()) * job.item();
  if (!is_half(job.op.dtype) && largest > job.settings.small_bytes) {
    return ring(job, job.size - 1, 1, job.size - 1, job.op.send, out);
  }
  auto lanes = job.lanes([&](int peer) {
    return Lane{peer, job.op.send + job.before(peer), job.chunk(peer), nullptr, job.chunk(job.rank)};
  });
  const DirectReduce::Target target{
      job.op.send + job.before(job.rank), out, job.chunk(job.rank), job.rank, job.op.dtype, job.op.reduce};
  return std::make_unique<DirectReduce>(std::move(lanes), target, job.pieces());
}

SchedulePtr all_gather(const Job& job) {
  const auto largest = *std::max_element(job.op.recv_counts.begin(), job.op.recv_counts.end()) * job.item();
  if (largest > job.settings.small_bytes) return ring_all_gather(job, job.op.send, job.op.recv);
  auto lanes = job.lanes([&](int peer) {
    return Lane{peer, job.op.send, job.chunk(job.rank), job.op.recv + job.before(peer), job.chunk(peer)};
  });
  Sequence::Parts parts;
  parts.push_back(std::make_unique<LocalCopy>(job.op.send, job.op.recv + job.before(job.rank), job.chunk(job.rank)));
  parts.push_back(std::make_unique<Exchange>(std::move(lanes), job.pieces()));
  return std::make_unique<Sequence>(std::move(parts));
}

SchedulePtr all_reduce(const Job& job) {
  // One step in which everybody sends everything: worth its bytes while those are few beside the latency of the
  // 2 (size - 1) steps it saves.
  if (job.bytes() * job.size <= 4 * job.settings.small_bytes) {
    auto lanes = job.lanes([&](int peer) { return Lane{peer, job.op.send, job.bytes(), nullptr, job.bytes()}; });
    const DirectReduce::Target target{job.op.send, job.op.recv, job.bytes(), job.rank, job.op.dtype, job.op.reduce};
    // `recv` may be `send`, so copies are sent; those leave all at once.
    const Pieces all{job.settings.segment_bytes, job.bytes() / job.settings.segment_bytes + 1};
    return std::make_unique<DirectReduce>(std::move(lanes), target, all, Exchange::Sources::kOverwritten);
  }
  if (!is_half(job.op.dtype)) return ring(job, 2 * (job.size - 1), 1, job.size - 1, job.op.send, job.op.recv);
  std::byte* const own = job.op.recv + job.before(job.rank);
  Sequence::Parts parts;
  parts.push_back(reduce_scatter_to(job, own));
  parts.push_back(ring_all_gather(job, own, job.op.recv));
  return std::make_unique<Sequence>(std::move(parts));
}

SchedulePtr reduce(const Job& job) {
  const bool is_root = job.rank == job.op.peer;
  if (job.bytes() <= job.settings.small_bytes) {
    if (!is_root) {
      std::vector<Lane> lanes{{job.op.peer, job.op.send, job.bytes(), nullptr, 0}};
      return std::make_unique<Exchange>(std::move(lanes), job.pieces());
    }
    auto lanes = job.lanes([&](int peer) { return Lane{peer, nullptr, 0, nullptr, job.bytes()}; });
    const DirectReduce::Target target{job.op.send, job.op.recv, job.bytes(), job.rank, job.op.dtype, job.op.reduce};
    return std::make_unique<DirectReduce>(std::move(lanes), target, job.pieces());
  }
  if (!is_half(job.op.dtype)) {
    const ChainReduce::Task task{job.rank,      job.size,    job.op.peer, job.op.dtype,
                                 job.op.reduce, job.op.send, job.op.recv, job.bytes()};
    return std::make_unique<ChainReduce>(task, job.chain_pieces());
  }
  // Every rank reduces its chunk, then the root collects them.
  Sequence::Parts parts;
  if (is_root) {
    parts.push_back(reduce_scatter_to(job, job.op.recv + job.before(job.rank)));
    auto lanes =
        job.lanes([&](int peer) { return Lane{peer, nullptr, 0, job.op.recv + job.before(peer), job.chunk(peer)}; });
    parts.push_back(std::make_unique<Exchange>(std::move(lanes), job.pieces()));
    return std::make_unique<Sequence>(std::move(parts));
  }
  auto scratch = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(job.chunk(job.rank)));
  parts.push_back(reduce_scatter_to(job, scratch.get()));
  std::vector<Lane> lanes{{job.op.peer, scratch.get(), job.chunk(job.rank), nullptr, 0}};
  parts.push_back(std::make_unique<Exchange>(std::move(lanes), job.pieces()));
  return std::make_unique<Sequence>(std::move(parts), std::move(scratch));
}

SchedulePtr broadcast(const Job& job) {
  const bool small = job.bytes() <= 2 * job.settings.small_bytes;
  auto node = small ? binomial_node(job.rank, job.size, job.op.peer) : chain_node(job.rank, job.size, job.op.peer);
  return std::make_unique<Broadcast>(std::move(node), job.op.recv, job.bytes(), job.chain_pieces());
}

SchedulePtr all_to_all(const Job& job) {
  const auto sends = offsets_of(job.op.send_counts);
  const auto receives = offsets_of(job.op.recv_counts);
  const auto lane_to = [&](int peer) {
    const auto p = static_cast<std::size_t>(peer);
    return Lane{peer, job.op.send + sends[p] * job.item(), job.op.send_counts[p] * job.item(),
                job.op.recv + receives[p] * job.item(), job.op.recv_counts[p] * job.item()};
  };
  const Lane own = lane_to(job.rank);
  Sequence::Parts parts;
  parts.push_back(std::make_unique<Exchange>(job.lanes(lane_to), job.shared_pieces()));
  parts.push_back(std::make_unique<LocalCopy>(own.out, own.in, own.out_bytes));
  return std::make_unique<Sequence>(std::move(parts));
}

SchedulePtr barrier(const Job& job) {
  static constexpr std::byte kToken{1};
  auto lanes = job.lanes([&](int peer) { return Lane{peer, &kToken, 1, nullptr, 1}; });
  auto scratch = std::make_unique<std::byte[]>(lanes.size() + 1);
  for (auto& lane : lanes) lane.in = scratch.get() + lane.peer;
  Sequence::Parts parts;
  parts.push_back(std::make_unique<Exchange>(std::move(lanes), job.pieces()));
  return std::make_unique<Sequence>(std::move(parts), std::move(scratch));
}

SchedulePtr message(const Job& job) {
  const bool sends = job.op.kind == OpKind::kSend;
  const Lane lane{job.op.peer, job.op.send, sends ? job.bytes() : 0, job.op.recv, sends ? 0 : job.bytes()};
  return std::make_unique<Message>(sends ? Message::Direction::kSend : Message::Direction::kReceive, lane, job.pieces(),
                                   signature_of(job.op, std::numeric_limits<int>::max()));
}

SchedulePtr announced(const Job& job, SchedulePtr operation) {
  const int left = (job.rank + job.size - 1) % job.size, right = (job.rank + 1) % job.size;
  return std::make_unique<Announced>(std::move(operation), left, right);
}

/// A group of one: what there is to move stays in this rank's memory.
SchedulePtr alone(const Job& job) {
  std::byte* const to = job.op.recv;
  const std::byte* const from = job.op.kind == OpKind::kBroadcast ? to : job.op.send;
  return std::make_unique<LocalCopy>(from, to, to == nullptr ? 0 : job.bytes());
}

}  // namespace

SchedulePtr plan(const Operation& operation, int rank, int size, const Settings& settings) {
  const Job job{operation, rank, size, settings};
  if (operation.kind == OpKind::kSend || operation.kind == OpKind::kReceive) return message(job);
  if (size == 1) return alone(job);
  if (operation.levels != nullptr) {
    if (auto schedule = levelled(operation, rank, settings)) return schedule;
  }
  switch (operation.kind) {
    case OpKind::kReduceScatter:
      return reduce_scatter_to(job, operation.recv);
    case OpKind::kAllGather:
      return all_gather(job);
    case OpKind::kAllReduce:
      return all_reduce(job);
    case OpKind::kBroadcast:
      return announced(job, broadcast(job));
    case OpKind::kReduce:
      return announced(job, reduce(job));
    case OpKind::kAllToAll:
      return all_to_all(job);
    case OpKind::kBarrier:
      return barrier(job);
    case OpKind::kSend:
    case OpKind::kReceive:
      break;
  }
  return message(job);
}

}  // namespace comm_core
