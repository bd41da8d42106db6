// Two sequences of schedules side by side, over two sets of ranks.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "schedule.hpp"

namespace comm_core {

/// The ranks of a set, by their places in it, over a transport that has more of them.
class Subset final : public Transport {
 public:
  Subset(Transport& all, std::vector<int> members) : all_(all), members_(std::move(members)) {}
  void send(int peer, const std::byte* data, std::int64_t bytes, SendMode mode, Schedule& from,
            std::int64_t ticket) override {
    all_.send(members_[static_cast<std::size_t>(peer)], data, bytes, mode, from, ticket);
  }
  void receive(int peer, std::byte* data, std::int64_t bytes, Schedule& to, std::int64_t ticket) override {
    all_.receive(members_[static_cast<std::size_t>(peer)], data, bytes, to, ticket);
  }

 private:
  Transport& all_;
  std::vector<int> members_;
};

/// A step begins when the one before it on its track is finished, and as many of the other track as it waits for. The
/// two tracks have no rank in common but this one, so the order of messages between any two ranks is that of a track.
/// All ranks have steps of the same kinds, which wait for the same: the first that is unfinished anywhere can always go
/// on.
///
/// Nor does a step begin while two before it are not drained: a rank that only sends would have everything buffered at
/// one that is slow.
class Tracks final : public Schedule {
 public:
  struct Step {
    std::function<std::unique_ptr<Schedule>()> make;
    std::int64_t bytes;     ///< that arrive in it, about
    std::size_t after = 0;  ///< steps of the other track
  };
  struct Track {
    std::vector<int> members;
    std::vector<Step> steps;
  };
  using Scratch = std::vector<std::unique_ptr<std::byte[]>>;
  Tracks(Track first, Track second, Scratch scratch = {});

  bool finished() override;
  bool drained() const override;
  std::int64_t bytes_left() const override;

 protected:
  void on_start() override;
  void on_sent(std::int64_t) override {}
  void on_received(std::int64_t) override {}

 private:
  struct Progress {
    Track track;
    std::optional<Subset> ranks = std::nullopt;
    std::deque<std::unique_ptr<Schedule>> begun = {};  // the last one may run; those before it are not drained
    std::size_t num_begun = 0, num_over = 0;

    bool runs() const { return num_over < num_begun; }
    bool at_end() const { return num_over == track.steps.size(); }
  };
  static bool advance(Progress& at, std::size_t num_over_there);

  Scratch scratch_;
  std::array<Progress, 2> progress_;
};

}  // namespace comm_core
