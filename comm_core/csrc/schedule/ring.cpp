#include "ring.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "../reduce/kernels.hpp"

namespace comm_core {
namespace {

/// What follows the last block that several chunks share.
Flow tail_of(const RingPlan& plan, std::int64_t lone_block, std::int64_t item) {
  const auto largest = *std::max_element(plan.counts.begin(), plan.counts.end());
  const auto count = std::max<std::int64_t>(0, largest - lone_block * plan.window * plan.segment);
  return {count * item, {plan.segment * item, plan.window}};
}

}  // namespace

Ring::Ring(RingTask task)
    : task_(std::move(task)),
      lone_block_(task_.plan.lone_block()),
      tail_(tail_of(task_.plan, lone_block_, item())),
      outgoing_(task_.plan, RingCursor::Direction::kSend),
      posting_(task_.plan, RingCursor::Direction::kReceive),
      incoming_(posting_) {
  for (int step = 0; step < task_.plan.steps; ++step) {
    bytes_left_ += task_.plan.counts[static_cast<std::size_t>(task_.plan.chunk_received(step))] * item();
  }
}

void Ring::on_start() {
  if (task_.reduce_steps > 0 && !posting_.at_end()) {
    // A window of posted receives and a window of arrived segments not yet passed on.
    const auto largest = *std::max_element(task_.plan.counts.begin(), task_.plan.counts.end());
    const auto per_step = std::min(task_.plan.window, (largest + task_.plan.segment - 1) / task_.plan.segment);
    num_slots_ = 2 * per_step;
    slots_ =
        std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(num_slots_ * task_.plan.segment * item()));
    for (std::int64_t i = num_slots_; i-- > 0;) free_slots_.push_back(i);
  }
  advance();
}

const std::byte* Ring::contribution(const RingCursor& at) const {
  // all_gather contributes its own chunk only, which is all that `send` is.
  const auto before = task_.reduce_steps > 0 ? task_.plan.offsets[static_cast<std::size_t>(at.chunk())] : 0;
  return task_.send + (before + at.offset()) * item();
}

std::byte* Ring::result(const RingCursor& at) const {
  const bool own_chunk_only = task_.reduce_steps == task_.plan.steps;
  const auto before = own_chunk_only ? 0 : task_.plan.offsets[static_cast<std::size_t>(at.chunk())];
  return task_.recv + (before + at.offset()) * item();
}

void Ring::post_receives() {
  while (!posting_.at_end() && static_cast<std::int64_t>(posted_.size()) < task_.plan.window) {
    std::int64_t index = kLoaned;
    std::byte* target = nullptr;
    if (reduces(posting_.place().step)) {
      if (free_slots_.empty()) return;
      index = free_slots_.back();
      free_slots_.pop_back();
      target = slot(index);
    } else {
      target = result(posting_);
    }
    const auto ticket = first_posted_ + static_cast<std::int64_t>(posted_.size());
    posted_.emplace_back(index, false);
    receive(task_.plan.left(), target, posting_.count() * item(), ticket);
    posting_.next();
  }
}

void Ring::on_received(std::int64_t ticket) {
  posted_[static_cast<std::size_t>(ticket - first_posted_)].second = true;
  while (!posted_.empty() && posted_.front().second) {
    const auto index = posted_.front().first;
    posted_.pop_front();
    ++first_posted_;
    take(index == kLoaned ? result(incoming_) : slot(index), index);
    bytes_left_ -= incoming_.count() * item();
    incoming_.next();
  }
  advance();
}

void Ring::take(std::byte* landed, std::int64_t index) {
  const int step = incoming_.place().step;
  const bool goes_on = step + 1 < task_.plan.steps;
  if (step + 1 < task_.reduce_steps) {
    combine(task_.dtype, task_.op, landed, contribution(incoming_), landed, incoming_.count());
  } else if (step + 1 == task_.reduce_steps) {
    std::byte* const out = result(incoming_);
    combine_last(task_.dtype, task_.op, out, contribution(incoming_), landed, incoming_.count(), task_.plan.size);
    free_slots_.push_back(index);
    landed = out;
    index = kLoaned;
  }
  if (goes_on) cargo_.push_back({landed, index});
}

bool Ring::may_inject() const {
  Place needed = outgoing_.place();
  if (needed.block == 0 || incoming_.at_end()) return true;
  --needed.block;
  needed.step = task_.plan.steps - 1;
  return incoming_.place() > needed;
}

void Ring::pass_on() {
  while (!outgoing_.at_end()) {
    Cargo next{nullptr, kLoaned};
    const auto bytes = outgoing_.count() * item();
    const bool in_tail = outgoing_.place().block >= lone_block_;
    if (in_tail && !tail_.open(tail_.num_segments())) return;
    if (outgoing_.place().step == 0) {
      if (!may_inject()) return;
      next.data = contribution(outgoing_);
      if (task_.reduce_steps == 0 && next.data != result(outgoing_)) {
        std::memcpy(result(outgoing_), next.data, static_cast<std::size_t>(bytes));
      }
    } else {
      if (cargo_.empty()) return;
      next = cargo_.front();
      cargo_.pop_front();
    }
    outgoing_.next();
    auto mode = outgoing_.at_end() ? SendMode::kMatched : SendMode::kEager;
    if (mode == SendMode::kMatched && next.slot == kLoaned) {
      send_copy(task_.plan.right(), next.data, bytes, mode);
      continue;
    }
    if (next.slot == kLoaned) ++num_loaned_;
    auto ticket = next.slot;
    if (in_tail) {
      const auto segment = tail_.take();
      mode = tail_.mode_of(segment);
      ticket = tail_ticket(segment, next.slot);
    }
    send(task_.plan.right(), next.data, bytes, mode, ticket);
  }
}

std::int64_t Ring::tail_ticket(std::int64_t segment, std::int64_t slot) const {
  // Beyond those that are a slot's number.
  return num_slots_ + segment * (num_slots_ + 1) + (slot == kLoaned ? num_slots_ : slot);
}

void Ring::on_sent(std::int64_t ticket) {
  const bool in_tail = ticket >= num_slots_;
  auto slot = ticket;
  if (in_tail) {
    const auto number = ticket - num_slots_;
    tail_.completed(number / (num_slots_ + 1));
    slot = number % (num_slots_ + 1);
    if (slot == num_slots_) slot = kLoaned;
  }
  if (slot == kLoaned) {
    --num_loaned_;
    if (!in_tail) return;
  } else {
    free_slots_.push_back(slot);
  }
  advance();
}

void Ring::advance() {
  post_receives();
  pass_on();
}

}  // namespace comm_core
