#include "signature.hpp"

namespace comm_core {
namespace {

// From the lowest bit: 4 of the kind, 4 of the dtype, 3 of the reduction, then the root.
constexpr int kKinds = 16, kDTypes = 16, kReduceOps = 8;
constexpr int kSplit = kKinds - 1, kFailure = kKinds - 2;

bool reduces(OpKind kind) {
  return kind == OpKind::kReduceScatter || kind == OpKind::kAllReduce || kind == OpKind::kReduce;
}

bool has_root(OpKind kind) { return kind == OpKind::kBroadcast || kind == OpKind::kReduce; }

}  // namespace

int signature_of(const Operation& operation, int largest) {
  // The two sides of a message mean the same.
  const auto kind = operation.kind == OpKind::kReceive ? OpKind::kSend : operation.kind;
  const auto num_roots = static_cast<int>((std::int64_t{largest} + 1) / (kKinds * kDTypes * kReduceOps));
  int signature = has_root(kind) ? operation.peer % num_roots : 0;
  signature = signature * kReduceOps + (reduces(kind) ? static_cast<int>(operation.reduce) : 0);
  signature = signature * kDTypes + static_cast<int>(operation.dtype);
  return signature * kKinds + static_cast<int>(kind);
}

int split_signature() noexcept { return kSplit; }

int failure_signature() noexcept { return kFailure; }

std::string describe_signature(std::int64_t signature) {
  if (signature == kSplit) return "split";
  const auto kind = static_cast<OpKind>(signature % kKinds);
  const auto dtype = static_cast<DType>(signature / kKinds % kDTypes);
  const auto op = static_cast<ReduceOp>(signature / kKinds / kDTypes % kReduceOps);
  // It came from outside: name_of() takes nothing but what there is.
  if (signature < 0 || kind > OpKind::kBarrier || dtype > DType::kBool || op > ReduceOp::kProd) return "something else";
  std::string text(name_of(kind));
  if (kind == OpKind::kBarrier) return text;
  text += " of " + std::string(name_of(dtype));
  if (reduces(kind)) text += ", op " + std::string(name_of(op));
  if (has_root(kind)) text += ", root " + std::to_string(signature / (kKinds * kDTypes * kReduceOps));
  return text;
}

}  // namespace comm_core
