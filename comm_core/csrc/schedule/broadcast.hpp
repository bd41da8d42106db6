// One rank's buffer down a tree: a chain for large buffers (every link carries the data once), a binomial tree for
// small ones (fewest hops).
#pragma once

#include <vector>

#include "flow.hpp"
#include "schedule.hpp"

namespace comm_core {

/// Where one rank stands in a tree. Pure.
struct TreeNode {
  int parent = -1;  ///< -1 at the root
  std::vector<int> children;
};
TreeNode chain_node(int rank, int size, int root);
TreeNode binomial_node(int rank, int size, int root);

class Broadcast final : public Schedule {
 public:
  Broadcast(TreeNode node, std::byte* data, std::int64_t bytes, Pieces pieces);
  bool finished() override { return bytes_left_ == 0 && num_unsent_ == 0; }
  std::int64_t bytes_left() const override { return bytes_left_; }

 protected:
  void on_start() override;
  void on_sent(std::int64_t ticket) override;
  void on_received(std::int64_t ticket) override;

 private:
  void post();
  void fill(std::size_t child);

  TreeNode node_;
  std::byte* data_;
  std::int64_t window_;
  Flow in_;
  std::vector<Flow> out_;  // per child
  std::int64_t posted_ = 0;
  std::int64_t available_ = 0;  // segments [0, available_) are here
  std::vector<bool> here_;      // segments that arrived beyond those
  std::int64_t bytes_left_ = 0;
  std::int64_t num_unsent_ = 0;
};

}  // namespace comm_core
