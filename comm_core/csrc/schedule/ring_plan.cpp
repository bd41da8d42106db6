#include "ring_plan.hpp"

#include <algorithm>

namespace comm_core {

std::int64_t RingPlan::num_blocks() const {
  const auto block = segment * window;
  return steps == 0 ? 0 : (*std::max_element(counts.begin(), counts.end()) + block - 1) / block;
}

std::int64_t RingPlan::lone_block() const {
  if (steps >= size) return num_blocks();
  std::int64_t largest = 0, second = 0;
  for (const auto count : counts) {
    second = std::max(second, std::min(count, largest));
    largest = std::max(largest, count);
  }
  const auto block = segment * window;
  return (second + block - 1) / block;
}

RingCursor::RingCursor(const RingPlan& plan, Direction direction)
    : plan_(&plan), direction_(direction), num_blocks_(plan.num_blocks()) {
  settle();
}

int RingCursor::chunk() const {
  return direction_ == Direction::kSend ? plan_->chunk_sent(place_.step) : plan_->chunk_received(place_.step);
}

std::int64_t RingCursor::count() const {
  return std::min(plan_->segment, plan_->counts[static_cast<std::size_t>(chunk())] - offset());
}

bool RingCursor::exists() const { return place_.index < plan_->window && count() > 0; }

void RingCursor::next() {
  ++place_.index;
  settle();
}

void RingCursor::settle() {
  while (!at_end() && !exists()) {
    place_.index = 0;
    if (++place_.step < plan_->steps) continue;
    place_.step = 0;
    ++place_.block;
  }
}

}  // namespace comm_core
