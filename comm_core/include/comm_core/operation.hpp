// A validated operation, as backends receive it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm_core/levels.hpp"
#include "comm_core/types.hpp"

namespace [[gnu::visibility("default")]] comm_core {

enum class OpKind { kReduceScatter, kAllGather, kAllReduce, kBroadcast, kReduce, kAllToAll, kSend, kReceive, kBarrier };

std::string_view name_of(OpKind kind) noexcept;

/// fp32 memory beside 16-bit elements that travel; null: none.
struct Wide {
  const float* from = nullptr;  ///< rounded into `send` when the operation is submitted, whatever is ahead of it
  std::byte* send = nullptr;
  std::int64_t num_sent = 0;
  float* to = nullptr;  ///< gets what `recv` has in the end
  std::int64_t num_received = 0;
};

/// Memory layout by kind (counts are elements per rank; chunks lie back to back in rank order):
///   reduce_scatter   send: every chunk,      recv: this rank's chunk,          recv_counts: the chunks
///   all_gather       send: this rank's chunk (may be its place in recv), recv: every chunk, recv_counts: the chunks
///   all_reduce       send, recv: everything (may be the same),                 recv_counts: balanced chunks
///   broadcast        recv: everything, at the root the source;                 peer: root
///   reduce           send: everything, recv: everything at the root, else null; recv_counts: balanced chunks; peer:
///   root all_to_all       send: a chunk for each rank (send_counts), recv: a chunk of each rank (recv_counts) send,
///   receive    send or recv; peer, tag
/// With Levels of kind kHybrid, a reduce_scatter and an all_gather have a chunk for each member of a group in place of
/// each rank: what the same member of any group receives is reduced over all ranks, and gathered is within groups.
struct Operation {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kUInt8;
  ReduceOp reduce = ReduceOp::kSum;
  const std::byte* send = nullptr;
  std::byte* recv = nullptr;
  std::int64_t count = 0;  ///< elements of the whole buffer
  std::vector<std::int64_t> send_counts, recv_counts;
  int peer = 0;
  int tag = 0;
  std::string label;
  std::vector<std::uintptr_t> after = {};  ///< streams of a device whose work so far comes before this operation
  Wide wide = {};
  std::shared_ptr<const Levels> levels = nullptr;  ///< null: all ranks are alike

  /// To be called on the thread that carries it out: before anything is sent, and once everything is there.
  void narrow() const;
  void widen() const;
};

/// Largest user tag of send and receive, plus one.
inline constexpr int kUserTags = 1024;

}  // namespace comm_core
