#include "comm_core/operation.hpp"

#include "reduce/half.hpp"

namespace comm_core {

void Operation::narrow() const {
  if (wide.from != nullptr) narrow_half(dtype, wide.from, wide.send, wide.num_sent);
}

void Operation::widen() const {
  if (wide.to != nullptr) widen_half(dtype, recv, wide.to, wide.num_received);
}

std::string_view name_of(OpKind kind) noexcept {
  switch (kind) {
    case OpKind::kReduceScatter:
      return "reduce_scatter";
    case OpKind::kAllGather:
      return "all_gather";
    case OpKind::kAllReduce:
      return "all_reduce";
    case OpKind::kBroadcast:
      return "broadcast";
    case OpKind::kReduce:
      return "reduce";
    case OpKind::kAllToAll:
      return "all_to_all";
    case OpKind::kSend:
      return "send";
    case OpKind::kReceive:
      return "recv";
    case OpKind::kBarrier:
      return "barrier";
  }
  __builtin_unreachable();
}

}  // namespace comm_core
