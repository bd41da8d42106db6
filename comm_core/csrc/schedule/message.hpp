// send and recv: a header, then the segments.
#pragma once

#include "exchange.hpp"

namespace comm_core {

/// The header makes both sides notice when they disagree about size or type, instead of mixing up two messages.
class Message final : public Schedule {
 public:
  enum class Direction { kSend, kReceive };
  Message(Direction direction, Lane lane, Pieces pieces, int signature);
  bool finished() override;
  std::int64_t bytes_left() const override { return bytes_left_; }

 protected:
  void on_start() override;
  void on_sent(std::int64_t ticket) override;
  void on_received(std::int64_t ticket) override;

 private:
  void send_segments();
  void post_segments();

  struct Header {
    std::int64_t bytes, signature;
  };
  static constexpr std::int64_t kHeaderTicket = -2;

  Direction direction_;
  Lane lane_;
  std::int64_t window_, bytes_;
  Flow flow_;
  std::int64_t num_unsent_ = 0;
  std::int64_t posted_ = 0, under_way_ = 0;
  const Header own_;
  Header header_{};
  bool header_arrived_ = false;
  std::int64_t bytes_left_ = 0;
};

}  // namespace comm_core
