#include "exchange.hpp"

#include <algorithm>
#include <utility>

#include "../reduce/kernels.hpp"

namespace comm_core {

Exchange::Exchange(std::vector<Lane> lanes, Pieces pieces, Sources sources)
    : lanes_(std::move(lanes)), pieces_(pieces), sources_(sources) {
  for (const auto& lane : lanes_) {
    progress_.push_back({Flow(lane.out_bytes, pieces), Flow(lane.in_bytes, pieces)});
    bytes_left_ += lane.in_bytes;
    num_unsent_ += progress_.back().out.num_segments();
  }
}

std::int64_t Exchange::ticket(std::size_t lane, std::int64_t segment) const {
  return segment * static_cast<std::int64_t>(lanes_.size()) + static_cast<std::int64_t>(lane);
}

std::byte* Exchange::landing(std::size_t lane, std::int64_t segment) {
  return lanes_[lane].in + segment * pieces_.segment_bytes;
}

void Exchange::on_start() {
  // Receives first: what arrives before its receive is posted costs the library a copy.
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) post(lane);
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) fill(lane);
}

void Exchange::post(std::size_t index) {
  Progress& at = progress_[index];
  while (at.next_in < at.in.num_segments() && at.receiving < pieces_.window) {
    std::byte* const target = landing(index, at.next_in);
    if (target == nullptr) return;
    ++at.receiving;
    receive(lanes_[index].peer, target, at.in.bytes_of(at.next_in), ticket(index, at.next_in));
    ++at.next_in;
  }
}

void Exchange::fill(std::size_t index) {
  const Lane& lane = lanes_[index];
  Flow& flow = progress_[index].out;
  while (flow.open(flow.num_segments())) {
    const auto segment = flow.take();
    const std::byte* const data = lane.out + flow.offset_of(segment);
    if (flow.is_last(segment) || sources_ == Sources::kOverwritten) {
      send_copy(lane.peer, data, flow.bytes_of(segment), flow.mode_of(segment));
      --num_unsent_;
    } else {
      send(lane.peer, data, flow.bytes_of(segment), flow.mode_of(segment), ticket(index, segment));
    }
  }
}

void Exchange::on_sent(std::int64_t ticket) {
  const auto lane = static_cast<std::size_t>(ticket) % lanes_.size();
  progress_[lane].out.completed(ticket / static_cast<std::int64_t>(lanes_.size()));
  --num_unsent_;
  fill(lane);
}

void Exchange::on_received(std::int64_t ticket) {
  const auto lane = static_cast<std::size_t>(ticket) % lanes_.size();
  const auto segment = ticket / static_cast<std::int64_t>(lanes_.size());
  Progress& at = progress_[lane];
  --at.receiving;
  bytes_left_ -= at.in.bytes_of(segment);
  landed(lane, segment);
  post(lane);
}

DirectReduce::DirectReduce(std::vector<Lane> lanes, Target target, Pieces pieces, Sources sources)
    : Exchange(std::move(lanes), pieces, sources),
      target_(target),
      stretch_(target.bytes, pieces),
      arrived_(static_cast<std::size_t>(pieces.window), 0) {}

void DirectReduce::on_start() {
  if (target_.bytes > 0) {
    const auto segments = std::min(pieces().window, stretch_.num_segments());
    const auto bytes = std::min(pieces().segment_bytes, target_.bytes) * segments;
    slots_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes) * lanes().size());
  }
  Exchange::on_start();
}

std::byte* DirectReduce::slot(std::size_t lane, std::int64_t segment) {
  const auto stride = std::min(pieces().segment_bytes, target_.bytes);
  const auto segments = std::min(pieces().window, stretch_.num_segments());
  return slots_.get() + (static_cast<std::int64_t>(lane) * segments + segment % segments) * stride;
}

std::byte* DirectReduce::landing(std::size_t lane, std::int64_t segment) {
  return segment < reduced_ + pieces().window ? slot(lane, segment) : nullptr;
}

void DirectReduce::landed(std::size_t, std::int64_t segment) {
  ++arrived_[static_cast<std::size_t>(segment % pieces().window)];
  const auto before = reduced_;
  while (reduced_ < stretch_.num_segments() &&
         arrived_[static_cast<std::size_t>(reduced_ % pieces().window)] == static_cast<int>(lanes().size())) {
    reduce_next();
  }
  if (reduced_ == before) return;
  for (std::size_t lane = 0; lane < lanes().size(); ++lane) post(lane);
}

void DirectReduce::reduce_next() {
  const auto offset = stretch_.offset_of(reduced_);
  std::vector<const std::byte*> sources(lanes().size() + 1);
  sources[static_cast<std::size_t>(target_.rank)] = target_.own + offset;
  for (std::size_t lane = 0; lane < lanes().size(); ++lane) {
    sources[static_cast<std::size_t>(lanes()[lane].peer)] = slot(lane, reduced_);
  }
  const auto item = static_cast<std::int64_t>(item_size(target_.dtype));
  combine_all(target_.dtype, target_.op, target_.out + offset, sources, stretch_.bytes_of(reduced_) / item);
  arrived_[static_cast<std::size_t>(reduced_ % pieces().window)] = 0;
  ++reduced_;
}

}  // namespace comm_core
