#include "broadcast.hpp"

#include <utility>

namespace comm_core {

TreeNode chain_node(int rank, int size, int root) {
  const int place = (rank - root + size) % size;
  TreeNode node;
  if (place > 0) node.parent = (rank - 1 + size) % size;
  if (place + 1 < size) node.children.push_back((rank + 1) % size);
  return node;
}

TreeNode binomial_node(int rank, int size, int root) {
  const int place = (rank - root + size) % size;
  TreeNode node;
  int reach = 1;
  while (reach < size && (place & reach) == 0) reach <<= 1;
  if (place > 0) node.parent = ((place & ~reach) + root) % size;
  for (int bit = reach >> 1; bit > 0; bit >>= 1) {
    if (place + bit < size) node.children.push_back((place + bit + root) % size);
  }
  return node;
}

Broadcast::Broadcast(TreeNode node, std::byte* data, std::int64_t bytes, Pieces pieces)
    : node_(std::move(node)),
      data_(data),
      window_(pieces.window),
      in_(bytes, pieces),
      out_(node_.children.size(), Flow(bytes, pieces)) {
  num_unsent_ = in_.num_segments() * static_cast<std::int64_t>(node_.children.size());
  if (node_.parent < 0) {
    available_ = in_.num_segments();
  } else {
    bytes_left_ = bytes;
    here_.resize(static_cast<std::size_t>(in_.num_segments()), false);
  }
}

void Broadcast::on_start() {
  post();
  for (std::size_t child = 0; child < out_.size(); ++child) fill(child);
}

void Broadcast::post() {
  while (node_.parent >= 0 && posted_ < in_.num_segments() && posted_ < available_ + window_) {
    receive(node_.parent, data_ + in_.offset_of(posted_), in_.bytes_of(posted_), posted_);
    ++posted_;
  }
}

void Broadcast::fill(std::size_t child) {
  Flow& flow = out_[child];
  while (flow.open(available_)) {
    const auto segment = flow.take();
    const std::byte* const data = data_ + flow.offset_of(segment);
    if (flow.is_last(segment)) {
      send_copy(node_.children[child], data, flow.bytes_of(segment), SendMode::kMatched);
      --num_unsent_;
    } else {
      const auto ticket = segment * static_cast<std::int64_t>(out_.size()) + static_cast<std::int64_t>(child);
      send(node_.children[child], data, flow.bytes_of(segment), flow.mode_of(segment), ticket);
    }
  }
}

void Broadcast::on_sent(std::int64_t ticket) {
  const auto child = static_cast<std::size_t>(ticket) % out_.size();
  out_[child].completed(ticket / static_cast<std::int64_t>(out_.size()));
  --num_unsent_;
  fill(child);
}

void Broadcast::on_received(std::int64_t ticket) {
  here_[static_cast<std::size_t>(ticket)] = true;
  bytes_left_ -= in_.bytes_of(ticket);
  while (available_ < in_.num_segments() && here_[static_cast<std::size_t>(available_)]) ++available_;
  post();
  for (std::size_t child = 0; child < out_.size(); ++child) fill(child);
}

}  // namespace comm_core
