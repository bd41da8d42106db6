#include "broadcast.hpp"

#include <algorithm>
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
      bytes_(bytes),
      pieces_(pieces),
      num_segments_((bytes + pieces.segment_bytes - 1) / pieces.segment_bytes),
      next_(node_.children.size(), 0),
      under_way_(node_.children.size(), 0) {
  num_unsent_ = num_segments_ * static_cast<std::int64_t>(node_.children.size());
  if (node_.parent < 0) {
    available_ = num_segments_;
  } else {
    bytes_left_ = bytes;
    here_.resize(static_cast<std::size_t>(num_segments_), false);
  }
}

std::int64_t Broadcast::bytes_of(std::int64_t segment) const {
  return std::min(pieces_.segment_bytes, bytes_ - segment * pieces_.segment_bytes);
}

void Broadcast::on_start() {
  post();
  for (std::size_t child = 0; child < next_.size(); ++child) fill(child);
}

void Broadcast::post() {
  while (node_.parent >= 0 && posted_ < num_segments_ && posted_ < available_ + pieces_.window) {
    receive(node_.parent, data_ + posted_ * pieces_.segment_bytes, bytes_of(posted_), posted_);
    ++posted_;
  }
}

void Broadcast::fill(std::size_t child) {
  while (next_[child] < available_ && under_way_[child] < pieces_.window) {
    const auto segment = next_[child]++;
    const std::byte* const data = data_ + segment * pieces_.segment_bytes;
    if (next_[child] == num_segments_) {
      send_copy(node_.children[child], data, bytes_of(segment), SendMode::kMatched);
      --num_unsent_;
      return;
    }
    ++under_way_[child];
    send(node_.children[child], data, bytes_of(segment), SendMode::kMatched, static_cast<std::int64_t>(child));
  }
}

void Broadcast::on_sent(std::int64_t ticket) {
  const auto child = static_cast<std::size_t>(ticket);
  --under_way_[child];
  --num_unsent_;
  fill(child);
}

void Broadcast::on_received(std::int64_t ticket) {
  here_[static_cast<std::size_t>(ticket)] = true;
  bytes_left_ -= bytes_of(ticket);
  while (available_ < num_segments_ && here_[static_cast<std::size_t>(available_)]) ++available_;
  post();
  for (std::size_t child = 0; child < next_.size(); ++child) fill(child);
}

}  // namespace comm_core
