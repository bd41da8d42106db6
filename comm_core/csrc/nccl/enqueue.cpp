#include "enqueue.hpp"

#include <algorithm>
#include <optional>
#include <string>

#include "../layout.hpp"
#include "comm_core/errors.hpp"

namespace comm_core {
namespace {

/// What is reduced; nullopt where NCCL has no such type.
std::optional<NcclType> type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return NcclType::kFloat16;
    case DType::kBFloat16:
      return NcclType::kBFloat16;
    case DType::kFloat32:
      return NcclType::kFloat32;
    case DType::kFloat64:
      return NcclType::kFloat64;
    case DType::kInt8:
      return NcclType::kInt8;
    case DType::kInt16:
      return std::nullopt;
    case DType::kInt32:
      return NcclType::kInt32;
    case DType::kInt64:
      return NcclType::kInt64;
    case DType::kUInt8:
    case DType::kBool:
      return NcclType::kUInt8;
  }
  __builtin_unreachable();
}

/// Booleans are bytes of 0 and 1: their sum is an or, their product an and. No average.
NcclOp op_of(ReduceOp op, DType dtype) {
  const bool logical = dtype == DType::kBool;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return logical ? NcclOp::kMax : NcclOp::kSum;
    case ReduceOp::kProd:
      return logical ? NcclOp::kMin : NcclOp::kProd;
    case ReduceOp::kMin:
      return NcclOp::kMin;
    case ReduceOp::kMax:
      return NcclOp::kMax;
  }
  __builtin_unreachable();
}

bool reduces(OpKind kind) {
  return kind == OpKind::kReduceScatter || kind == OpKind::kAllReduce || kind == OpKind::kReduce;
}

/// An operation's calls, on one stream.
class Calls {
 public:
  Calls(const NcclApi& nccl, NcclComm comm, const Operation& o, int rank, int size, CudaStream stream)
      : nccl_(nccl), comm_(comm), o_(o), rank_(rank), size_(size), stream_(stream) {}

  void reduce_scatter() const {
    const auto& counts = o_.recv_counts;
    if (equal(counts)) {
      if (counts[0] > 0) {
        nccl_.reduce_scatter(o_.send, o_.recv, elements(counts[0]), type(), op(), comm_, stream_);
      }
      return;
    }
    const auto offsets = offsets_of(counts);
    together([&](std::size_t r) {
      if (counts[r] == 0) return;
      std::byte* const into = static_cast<int>(r) == rank_ ? o_.recv : nullptr;
      nccl_.reduce(at(o_.send, offsets[r]), into, elements(counts[r]), type(), op(), static_cast<int>(r), comm_,
                   stream_);
    });
  }

  void all_gather() const {
    const auto& counts = o_.recv_counts;
    if (equal(counts)) {
      if (counts[0] > 0) nccl_.all_gather(o_.send, o_.recv, bytes(counts[0]), NcclType::kUInt8, comm_, stream_);
      return;
    }
    const auto offsets = offsets_of(counts);
    together([&](std::size_t r) {
      if (counts[r] == 0) return;
      std::byte* const place = at(o_.recv, offsets[r]);
      nccl_.broadcast(static_cast<int>(r) == rank_ ? o_.send : place, place, bytes(counts[r]), NcclType::kUInt8,
                      static_cast<int>(r), comm_, stream_);
    });
  }

  void all_to_all() const {
    const auto from = offsets_of(o_.send_counts), to = offsets_of(o_.recv_counts);
    together([&](std::size_t r) {
      const int peer = static_cast<int>(r);
      if (o_.send_counts[r] > 0)
        nccl_.send(at(o_.send, from[r]), bytes(o_.send_counts[r]), NcclType::kUInt8, peer, comm_, stream_);
      if (o_.recv_counts[r] > 0)
        nccl_.receive(at(o_.recv, to[r]), bytes(o_.recv_counts[r]), NcclType::kUInt8, peer, comm_, stream_);
    });
  }

  void all_reduce() const {
    if (o_.count > 0) nccl_.all_reduce(o_.send, o_.recv, elements(o_.count), type(), op(), comm_, stream_);
  }

  void reduce() const {
    if (o_.count > 0) nccl_.reduce(o_.send, o_.recv, elements(o_.count), type(), op(), o_.peer, comm_, stream_);
  }

  void broadcast() const {
    if (o_.count > 0) nccl_.broadcast(o_.recv, o_.recv, bytes(o_.count), NcclType::kUInt8, o_.peer, comm_, stream_);
  }

  void send() const {
    if (o_.count > 0) nccl_.send(o_.send, bytes(o_.count), NcclType::kUInt8, o_.peer, comm_, stream_);
  }

  void receive() const {
    if (o_.count > 0) nccl_.receive(o_.recv, bytes(o_.count), NcclType::kUInt8, o_.peer, comm_, stream_);
  }

  void barrier(CudaAddress scratch) const {
    void* const byte = reinterpret_cast<void*>(scratch);
    nccl_.all_reduce(byte, byte, 1, NcclType::kUInt8, NcclOp::kMax, comm_, stream_);
  }

 private:
  static bool equal(const CountList& counts) {
    return std::ranges::all_of(counts, [&](std::int64_t count) { return count == counts[0]; });
  }
  static std::size_t elements(std::int64_t count) { return static_cast<std::size_t>(count); }
  std::size_t bytes(std::int64_t count) const { return static_cast<std::size_t>(count) * item_size(o_.dtype); }
  template <class T>
  T* at(T* start, std::int64_t count) const {
    return start + bytes(count);
  }
  NcclType type() const { return *type_of(o_.dtype); }
  NcclOp op() const { return op_of(o_.reduce, o_.dtype); }

  /// `call` for every rank, in one group. A group that was begun is ended, else this thread could issue nothing more.
  template <class Call>
  void together(const Call& call) const {
    nccl_.group_start();
    try {
      for (std::size_t r = 0; r < static_cast<std::size_t>(size_); ++r) call(r);
    } catch (const NcclError&) {
      try {
        nccl_.group_end();
      } catch (const NcclError&) {  // the first error is the one to tell
      }
      throw;
    }
    nccl_.group_end();
  }

  const NcclApi& nccl_;
  const NcclComm comm_;
  const Operation& o_;
  const int rank_, size_;
  const CudaStream stream_;
};

}  // namespace

void require_supported(const Operation& o, int rank) {
  const std::string op(name_of(o.kind));
  if (reduces(o.kind) && !type_of(o.dtype)) {
    throw Unsupported(op + ": NCCL does not reduce " + std::string(name_of(o.dtype)) + "; convert it to int32 before");
  }
  if (reduces(o.kind) && o.reduce == ReduceOp::kAvg) {
    throw Unsupported(op +
                      ": NCCL divides before it adds, which rounds small values away; reduce with sum and divide the "
                      "result by the number of ranks");
  }
  if (o.kind != OpKind::kSend && o.kind != OpKind::kReceive) return;
  if (o.tag != 0) {
    throw Unsupported(op + ": tag is " + std::to_string(o.tag) +
                      " but NCCL has none and matches messages by their order; use tag 0");
  }
  if (o.peer == rank) {
    throw Unsupported(op + ": rank " + std::to_string(rank) + " cannot message itself through NCCL; copy instead");
  }
}

void enqueue(const NcclApi& nccl, NcclComm comm, const Operation& o, int rank, int size, CudaStream stream,
             CudaAddress scratch) {
  const Calls calls(nccl, comm, o, rank, size, stream);
  switch (o.kind) {
    case OpKind::kReduceScatter:
      return calls.reduce_scatter();
    case OpKind::kAllGather:
      return calls.all_gather();
    case OpKind::kAllReduce:
      return calls.all_reduce();
    case OpKind::kBroadcast:
      return calls.broadcast();
    case OpKind::kReduce:
      return calls.reduce();
    case OpKind::kAllToAll:
      return calls.all_to_all();
    case OpKind::kSend:
      return calls.send();
    case OpKind::kReceive:
      return calls.receive();
    case OpKind::kBarrier:
      return calls.barrier(scratch);
  }
  __builtin_unreachable();
}

}  // namespace comm_core
