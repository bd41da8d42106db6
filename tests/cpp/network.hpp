// A network in memory, on which the schedules of all ranks run in one thread; it delivers in any order it likes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "schedule/schedule.hpp"

namespace comm_core {

using Random = std::mt19937_64;

inline int pick(Random& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

struct Post {
  Schedule* schedule;
  std::int64_t ticket;
  std::byte* data;  // of a send: where the bytes are read
  std::int64_t bytes;
  bool buffered = false;
  std::vector<std::byte> copy = {};
};

class Network {
 public:
  /// A `slow` rank takes messages only when nothing else can happen.
  Network(int size, bool buffers, int slow, Random& random)
      : size_(size), buffers_(buffers), slow_(slow), random_(random) {}

  /// Whether a rank takes messages just now; every one does unless told otherwise.
  std::function<bool(int)> awake = [](int) { return true; };

  std::deque<Post>& sends(int from, int to) { return sends_[from * size_ + to]; }
  std::deque<Post>& receives(int from, int to) { return receives_[from * size_ + to]; }

  void send(int from, int to, Post post, SendMode mode) {
    post.buffered = buffers_ && mode == SendMode::kEager && pick(random_, 0, 3) > 0;
    if (post.buffered) {
      post.copy.assign(post.data, post.data + post.bytes);
      early_.push_back({post.schedule, post.ticket, nullptr, 0});
    }
    bytes_[from * size_ + to] += post.bytes;
    sends(from, to).push_back(std::move(post));
    most_waiting_ = std::max(most_waiting_, static_cast<std::int64_t>(sends(from, to).size()));
  }

  /// The most messages that were ever on their way from one rank to another.
  std::int64_t most_waiting() const { return most_waiting_; }

  /// All that was ever sent from one rank to another.
  std::int64_t bytes(int from, int to) { return bytes_[from * size_ + to]; }

  /// Lets one thing happen; false if nothing can.
  bool step() {
    std::vector<int> ready, to_slow;
    for (auto& [pair, queue] : sends_) {
      if (queue.empty() || receives_[pair].empty() || !awake(pair % size_)) continue;
      (pair % size_ == slow_ ? to_slow : ready).push_back(pair);
    }
    if (ready.empty() && early_.empty()) ready = to_slow;
    const int choices = static_cast<int>(ready.size() + early_.size());
    if (choices == 0) return false;
    const auto choice = static_cast<std::size_t>(pick(random_, 0, choices - 1));
    if (choice >= ready.size()) {
      const Post done = std::move(early_[choice - ready.size()]);
      early_.erase(early_.begin() + static_cast<std::ptrdiff_t>(choice - ready.size()));
      done.schedule->sent(done.ticket);
      return true;
    }
    deliver(ready[choice]);
    return true;
  }

 private:
  void deliver(int pair) {
    Post send = std::move(sends_[pair].front());
    Post receive = std::move(receives_[pair].front());
    sends_[pair].pop_front();
    receives_[pair].pop_front();
    if (send.bytes != receive.bytes) throw std::runtime_error("a message has another size than its receive");
    std::memcpy(receive.data, send.buffered ? send.copy.data() : send.data, static_cast<std::size_t>(send.bytes));
    if (!send.buffered) send.schedule->sent(send.ticket);
    receive.schedule->received(receive.ticket);
  }

  int size_;
  bool buffers_;
  int slow_;
  Random& random_;
  std::map<int, std::deque<Post>> sends_, receives_;
  std::vector<Post> early_;
  std::map<int, std::int64_t> bytes_;
  std::int64_t most_waiting_ = 0;
};

class Endpoint final : public Transport {
 public:
  Endpoint(Network& network, int rank) : network_(network), rank_(rank) {}
  void send(int peer, const std::byte* data, std::int64_t bytes, SendMode mode, Schedule& s, std::int64_t t) override {
    network_.send(rank_, peer, {&s, t, const_cast<std::byte*>(data), bytes}, mode);
  }
  void receive(int peer, std::byte* data, std::int64_t bytes, Schedule& s, std::int64_t t) override {
    network_.receives(peer, rank_).push_back({&s, t, data, bytes});
  }

 private:
  Network& network_;
  int rank_;
};

}  // namespace comm_core
