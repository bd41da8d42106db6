#include "ring_plan.hpp"

#include <algorithm>

namespace comm_core {

RingCursor::RingCursor(const RingPlan& plan, Direction direction) : plan_(&plan), direction_(direction) {
  const auto largest = *std::max_element(plan.counts.begin(), plan.counts.end());
  const auto block = plan.segment * plan.window;
  num_blocks_ = plan.steps == 0 ? 0 : (largest + block - 1) / block;
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
