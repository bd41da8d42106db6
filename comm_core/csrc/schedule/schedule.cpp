#include "schedule.hpp"

#include <cstring>

namespace comm_core {

void Schedule::start(Transport& transport) {
  transport_ = &transport;
  on_start();
}

void Schedule::sent(std::int64_t ticket) {
  --outstanding_;
  if (ticket != kCopyTicket) on_sent(ticket);
}

void Schedule::received(std::int64_t ticket) {
  --outstanding_;
  on_received(ticket);
}

void Schedule::send(int peer, const std::byte* data, std::int64_t bytes, SendMode mode, std::int64_t ticket) {
  transport_->send(peer, data, bytes, mode, *this, ticket);
  ++outstanding_;
}

void Schedule::send_copy(int peer, const std::byte* data, std::int64_t bytes, SendMode mode) {
  copies_.push_back(std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes)));
  std::memcpy(copies_.back().get(), data, static_cast<std::size_t>(bytes));
  send(peer, copies_.back().get(), bytes, mode, kCopyTicket);
}

void Schedule::receive(int peer, std::byte* data, std::int64_t bytes, std::int64_t ticket) {
  transport_->receive(peer, data, bytes, *this, ticket);
  ++outstanding_;
}

}  // namespace comm_core
