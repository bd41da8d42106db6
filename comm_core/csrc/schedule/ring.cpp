#include "ring.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "../reduce/kernels.hpp"

namespace comm_core {

Ring::Ring(RingTask task)
    : task_(std::move(task)),
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
    const std::int64_t num_slots = 2 * per_step;
    slots_ =
        std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(num_slots * task_.plan.segment * item()));
    for (std::int64_t i = num_slots; i-- > 0;) free_slots_.push_back(i);
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
    const auto mode = outgoing_.at_end() ? SendMode::kMatched : SendMode::kEager;
    if (mode == SendMode::kMatched && next.slot == kLoaned) {
      send_copy(task_.plan.right(), next.data, bytes, mode);
      continue;
    }
    if (next.slot == kLoaned) ++num_loaned_;
    send(task_.plan.right(), next.data, bytes, mode, next.slot);
  }
}

void Ring::on_sent(std::int64_t ticket) {
  if (ticket == kLoaned) {
    --num_loaned_;
    return;
  }
  free_slots_.push_back(ticket);
  advance();
}

void Ring::advance() {
  post_receives();
  pass_on();
}

}  // namespace comm_core
