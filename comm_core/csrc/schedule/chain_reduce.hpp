// reduce of a large buffer: partial sums travel down a chain to the root, segment by segment.
#pragma once

#include <memory>
#include <vector>

#include "comm_core/types.hpp"
#include "flow.hpp"
#include "schedule.hpp"

namespace comm_core {

/// The root's right neighbour begins, and every rank adds its contribution to what comes from its left neighbour; the
/// root, at the end of the chain, keeps the result. Every link carries the buffer once. Not for the 16-bit floating
/// types.
class ChainReduce final : public Schedule {
 public:
  struct Task {
    int rank, size, root;
    DType dtype;
    ReduceOp op;
    const std::byte* send;
    std::byte* recv;  ///< at the root, perhaps the same as send
    std::int64_t bytes;
  };
  ChainReduce(Task task, Pieces pieces);
  bool finished() override { return bytes_left_ == 0 && num_unsent_ == 0; }
  std::int64_t bytes_left() const override { return bytes_left_; }

 protected:
  void on_start() override;
  void on_sent(std::int64_t ticket) override;
  void on_received(std::int64_t ticket) override;

 private:
  bool begins() const { return (task_.root + 1) % task_.size == task_.rank; }
  bool ends() const { return task_.root == task_.rank; }
  std::byte* slot(std::int64_t segment) { return slots_.get() + segment % num_slots_ * pieces_.segment_bytes; }
  void post();
  void pass_on();

  Task task_;
  Pieces pieces_;
  Flow flow_;
  std::int64_t num_slots_;
  std::unique_ptr<std::byte[]> slots_;
  std::int64_t posted_ = 0;
  std::int64_t available_ = 0;     // segments [0, available_) carry this rank's contribution
  std::int64_t freed_ = 0;         // slots of segments [0, freed_) may be used again
  std::vector<bool> here_, gone_;  // segments that arrived, or left, beyond those
  std::int64_t bytes_left_ = 0;
  std::int64_t num_unsent_ = 0;
};

}  // namespace comm_core
