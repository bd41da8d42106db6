#include "message.hpp"

#include <string>

#include "../signature.hpp"
#include "comm_core/errors.hpp"

namespace comm_core {

Message::Message(Direction direction, Lane lane, Pieces pieces, int signature)
    : direction_(direction),
      lane_(lane),
      window_(pieces.window),
      bytes_(direction == Direction::kSend ? lane.out_bytes : lane.in_bytes),
      flow_(bytes_, pieces),
      own_{bytes_, signature} {
  if (direction == Direction::kSend) {
    num_unsent_ = flow_.num_segments();
  } else {
    bytes_left_ = bytes_;
  }
}

bool Message::finished() {
  return direction_ == Direction::kSend ? num_unsent_ == 0 : header_arrived_ && bytes_left_ == 0;
}

void Message::on_start() {
  if (direction_ == Direction::kSend) {
    const auto mode = flow_.num_segments() == 0 ? SendMode::kMatched : SendMode::kEager;
    send_copy(lane_.peer, reinterpret_cast<const std::byte*>(&own_), sizeof own_, mode);
    send_segments();
  } else {
    receive(lane_.peer, reinterpret_cast<std::byte*>(&header_), sizeof header_, kHeaderTicket);
    post_segments();
  }
}

void Message::send_segments() {
  while (flow_.open(flow_.num_segments())) {
    const auto segment = flow_.take();
    const std::byte* const data = lane_.out + flow_.offset_of(segment);
    if (flow_.is_last(segment)) {
      send_copy(lane_.peer, data, flow_.bytes_of(segment), SendMode::kMatched);
      --num_unsent_;
    } else {
      send(lane_.peer, data, flow_.bytes_of(segment), flow_.mode_of(segment), segment);
    }
  }
}

void Message::post_segments() {
  while (posted_ < flow_.num_segments() && under_way_ < window_) {
    ++under_way_;
    receive(lane_.peer, lane_.in + flow_.offset_of(posted_), flow_.bytes_of(posted_), posted_);
    ++posted_;
  }
}

void Message::on_sent(std::int64_t ticket) {
  flow_.completed(ticket);
  --num_unsent_;
  send_segments();
}

void Message::on_received(std::int64_t ticket) {
  if (ticket != kHeaderTicket) {
    --under_way_;
    bytes_left_ -= flow_.bytes_of(ticket);
    return post_segments();
  }
  header_arrived_ = true;
  if (header_.bytes != own_.bytes) {
    throw TransportError("the peer sends " + std::to_string(header_.bytes) + " bytes but " +
                         std::to_string(own_.bytes) + " were expected");
  }
  if (header_.signature != own_.signature) {
    throw TransportError("the peer's is a " + describe_signature(header_.signature) + " but a " +
                         describe_signature(own_.signature) + " was expected");
  }
}

}  // namespace comm_core
