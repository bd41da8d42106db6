// How fast one stream of segments may leave.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "comm_core/settings.hpp"
#include "schedule.hpp"

namespace comm_core {

struct Pieces {
  std::int64_t segment_bytes;
  std::int64_t window;
};

/// [Note: long networks] What is in flight has to last until the peer has said that it took something, twice the
/// `seconds` that a message takes: at 10 Gbit/s, or the wire is idle meanwhile. A larger window than that costs more in
/// memory that caches do not hold, on short networks half of the speed.
inline std::int64_t window_over(double seconds, const Settings& settings) {
  if (settings.window_is_given) return settings.window;
  constexpr double kBytesPerSecond = 1.25e9;
  constexpr std::int64_t kMost = 64;
  const double segments = std::ceil(2 * seconds * kBytesPerSecond / static_cast<double>(settings.segment_bytes));
  if (segments >= static_cast<double>(kMost)) return std::max(settings.window, kMost);
  return std::max(settings.window, static_cast<std::int64_t>(segments));
}

/// The segments of one stream to one peer. Twice a window, and at its end, a segment is sent kMatched: its completion
/// tells that the peer took everything before it, and lets the next ones leave. So at most a window of segments is
/// buffered at a peer that is slow, at little cost in acknowledgements.
class Flow {
 public:
  Flow(std::int64_t total_bytes, Pieces pieces)
      : bytes_(total_bytes),
        pieces_(pieces),
        num_segments_((total_bytes + pieces.segment_bytes - 1) / pieces.segment_bytes),
        stride_(std::max<std::int64_t>(1, pieces.window / 2)) {}

  std::int64_t num_segments() const { return num_segments_; }
  std::int64_t offset_of(std::int64_t segment) const { return segment * pieces_.segment_bytes; }
  std::int64_t bytes_of(std::int64_t segment) const {
    return std::min(pieces_.segment_bytes, bytes_ - offset_of(segment));
  }

  /// Whether the next segment may leave, of which `available` are there.
  bool open(std::int64_t available) const {
    return next_ < std::min(available, num_segments_) && next_ < taken_ + pieces_.window;
  }
  std::int64_t take() { return next_++; }
  bool is_last(std::int64_t segment) const { return segment + 1 == num_segments_; }
  SendMode mode_of(std::int64_t segment) const {
    return is_last(segment) || segment % stride_ == stride_ - 1 ? SendMode::kMatched : SendMode::kEager;
  }
  /// The segment's send is complete.
  void completed(std::int64_t segment) {
    if (mode_of(segment) == SendMode::kMatched) taken_ = std::max(taken_, segment + 1);
  }

 private:
  std::int64_t bytes_;
  Pieces pieces_;
  std::int64_t num_segments_, stride_;
  std::int64_t next_ = 0;
  std::int64_t taken_ = 0;  // segments the peer surely has
};

}  // namespace comm_core
