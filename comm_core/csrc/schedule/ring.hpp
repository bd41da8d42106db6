// reduce_scatter, all_gather and all_reduce as one segmented ring.
#pragma once

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "comm_core/types.hpp"
#include "flow.hpp"
#include "ring_plan.hpp"
#include "schedule.hpp"

namespace comm_core {

/// The first `reduce_steps` steps add this rank's contribution to what arrives, the others pass it on as it is:
///   reduce_scatter  size - 1 steps, all of them reducing; `recv` is this rank's chunk
///   all_gather      size - 1 steps, none reducing;        `recv` is everything, `send` this rank's chunk
///   all_reduce      both in a row;                        `send` and `recv` are everything, perhaps the same
struct RingTask {
  RingPlan plan;
  int reduce_steps = 0;
  DType dtype = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  const std::byte* send = nullptr;
  std::byte* recv = nullptr;
};

/// [Note: pace] An eager send completes at once, so an unpaced sender would have the whole message buffered at a slow
/// receiver. A segment leaves only when the one a block earlier in the common order has arrived from the left: all
/// ranks therefore stay within a window of each other. Each wait points to a strictly earlier place of the order, so
/// ranks cannot wait for each other in a circle, whatever their chunks' sizes.
///
/// Where one chunk is larger than all others, nothing comes from the left any more that its owner could wait for while
/// the rest of it, the tail, goes from rank to rank. There every rank is paced by its right neighbour (Flow): a segment
/// leaves when that one surely has the segment a window before it.
class Ring final : public Schedule {
 public:
  explicit Ring(RingTask task);
  bool finished() override { return incoming_.at_end() && outgoing_.at_end() && num_loaned_ == 0; }
  std::int64_t bytes_left() const override { return bytes_left_; }

 protected:
  void on_start() override;
  void on_sent(std::int64_t ticket) override;
  void on_received(std::int64_t ticket) override;

 private:
  /// A segment that arrived and waits to be passed on; slot < 0 if it lies in the caller's memory.
  struct Cargo {
    const std::byte* data;
    std::int64_t slot;
  };
  static constexpr std::int64_t kLoaned = -2;  // apart from kCopyTicket

  bool reduces(int step) const { return step < task_.reduce_steps; }
  std::int64_t item() const { return static_cast<std::int64_t>(item_size(task_.dtype)); }
  std::byte* slot(std::int64_t index) { return slots_.get() + index * task_.plan.segment * item(); }
  const std::byte* contribution(const RingCursor& at) const;
  std::byte* result(const RingCursor& at) const;
  void post_receives();
  void take(std::byte* landed, std::int64_t slot);
  void pass_on();
  bool may_inject() const;
  std::int64_t tail_ticket(std::int64_t segment, std::int64_t slot) const;
  void advance();

  RingTask task_;
  const std::int64_t lone_block_;  // where the tail begins
  Flow tail_;
  RingCursor outgoing_, posting_, incoming_;
  std::deque<std::pair<std::int64_t, bool>>
      posted_;                     // slot (or kLoaned) of each posted receive, and whether it arrived
  std::int64_t first_posted_ = 0;  // ticket of posted_.front()
  std::deque<Cargo> cargo_;
  std::unique_ptr<std::byte[]> slots_;
  std::vector<std::int64_t> free_slots_;
  std::int64_t num_slots_ = 0;
  std::int64_t num_loaned_ = 0;  // sends under way from the caller's memory
  std::int64_t bytes_left_ = 0;
};

}  // namespace comm_core
