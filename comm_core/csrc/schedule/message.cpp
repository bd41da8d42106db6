#include "message.hpp"

#include <algorithm>
#include <string>

#include "comm_core/errors.hpp"

namespace comm_core {

Message::Message(Direction direction, Lane lane, Pieces pieces)
    : direction_(direction),
      lane_(lane),
      pieces_(pieces),
      bytes_(direction == Direction::kSend ? lane.out_bytes : lane.in_bytes),
      num_segments_((bytes_ + pieces.segment_bytes - 1) / pieces.segment_bytes) {
  if (direction == Direction::kReceive) bytes_left_ = bytes_;
}

std::int64_t Message::bytes_of(std::int64_t segment) const {
  return std::min(pieces_.segment_bytes, bytes_ - segment * pieces_.segment_bytes);
}

bool Message::finished() {
  return next_ == num_segments_ && under_way_ == 0 && (direction_ == Direction::kSend || header_arrived_);
}

void Message::on_start() {
  if (direction_ == Direction::kSend) {
    send_copy(lane_.peer, reinterpret_cast<const std::byte*>(&bytes_), sizeof bytes_,
              num_segments_ == 0 ? SendMode::kMatched : SendMode::kEager);
  } else {
    receive(lane_.peer, reinterpret_cast<std::byte*>(&header_), sizeof header_, kHeaderTicket);
  }
  fill();
}

void Message::fill() {
  while (next_ < num_segments_ && under_way_ < pieces_.window) {
    const auto segment = next_++;
    const auto offset = segment * pieces_.segment_bytes;
    if (direction_ == Direction::kReceive) {
      ++under_way_;
      receive(lane_.peer, lane_.in + offset, bytes_of(segment), segment);
    } else if (next_ == num_segments_) {
      send_copy(lane_.peer, lane_.out + offset, bytes_of(segment), SendMode::kMatched);
    } else {
      ++under_way_;
      send(lane_.peer, lane_.out + offset, bytes_of(segment), SendMode::kMatched, segment);
    }
  }
}

void Message::on_sent(std::int64_t) {
  --under_way_;
  fill();
}

void Message::on_received(std::int64_t ticket) {
  if (ticket != kHeaderTicket) {
    --under_way_;
    bytes_left_ -= bytes_of(ticket);
    fill();
    return;
  }
  header_arrived_ = true;
  if (header_ != bytes_) {
    throw TransportError("the peer sends " + std::to_string(header_) + " bytes but " + std::to_string(bytes_) +
                         " were expected");
  }
}

}  // namespace comm_core
