#include "chain_reduce.hpp"

#include <utility>

#include "../reduce/kernels.hpp"

namespace comm_core {

ChainReduce::ChainReduce(Task task, Pieces pieces)
    : task_(task), pieces_(pieces), flow_(task.bytes, pieces), num_slots_(2 * pieces.window) {
  const auto segments = static_cast<std::size_t>(flow_.num_segments());
  if (begins()) {
    available_ = flow_.num_segments();
  } else {
    bytes_left_ = task_.bytes;
    here_.resize(segments, false);
    slots_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(num_slots_ * pieces_.segment_bytes));
  }
  if (!ends()) {
    num_unsent_ = flow_.num_segments();
    gone_.resize(segments, false);
  }
}

void ChainReduce::on_start() {
  post();
  pass_on();
}

void ChainReduce::post() {
  const int left = (task_.rank + task_.size - 1) % task_.size;
  while (!begins() && posted_ < flow_.num_segments() && posted_ < available_ + pieces_.window &&
         posted_ < freed_ + num_slots_) {
    receive(left, slot(posted_), flow_.bytes_of(posted_), posted_);
    ++posted_;
  }
}

void ChainReduce::pass_on() {
  const int right = (task_.rank + 1) % task_.size;
  while (!ends() && flow_.open(available_)) {
    const auto segment = flow_.take();
    const std::byte* const data = begins() ? task_.send + flow_.offset_of(segment) : slot(segment);
    if (flow_.is_last(segment)) {
      send_copy(right, data, flow_.bytes_of(segment), SendMode::kMatched);
      --num_unsent_;
    } else {
      send(right, data, flow_.bytes_of(segment), flow_.mode_of(segment), segment);
    }
  }
}

void ChainReduce::on_sent(std::int64_t segment) {
  flow_.completed(segment);
  --num_unsent_;
  gone_[static_cast<std::size_t>(segment)] = true;
  while (freed_ < flow_.num_segments() && gone_[static_cast<std::size_t>(freed_)]) ++freed_;
  post();
  pass_on();
}

void ChainReduce::on_received(std::int64_t segment) {
  const auto count = flow_.bytes_of(segment) / static_cast<std::int64_t>(item_size(task_.dtype));
  const std::byte* const own = task_.send + flow_.offset_of(segment);
  if (ends()) {
    combine_last(task_.dtype, task_.op, task_.recv + flow_.offset_of(segment), own, slot(segment), count, task_.size);
  } else {
    combine(task_.dtype, task_.op, slot(segment), own, slot(segment), count);
  }
  here_[static_cast<std::size_t>(segment)] = true;
  while (available_ < flow_.num_segments() && here_[static_cast<std::size_t>(available_)]) ++available_;
  if (ends()) freed_ = available_;
  bytes_left_ -= flow_.bytes_of(segment);
  post();
  pass_on();
}

}  // namespace comm_core
