// How long an engine may sleep between two looks. Waiting must be polite: the cores belong to the user's computation.
#pragma once

#include <chrono>
#include <cstdint>

#include "comm_core/settings.hpp"

namespace [[gnu::visibility("default")]] comm_core {

/// [Note: naps] While nothing arrives, a nap lasts an eighth of the time already waited: waiting costs little, and what
/// a nap adds is small beside what the wait took. While data streams, a quarter of the time in which a whole window of
/// segments arrives: the wire stays busy although nobody looks, and every look finds several segments.
class Pace {
 public:
  using Clock = std::chrono::steady_clock;
  using Micros = std::chrono::microseconds;

  explicit Pace(const Settings& settings) : settings_(settings) {}

  /// Something happened: `total` bytes have arrived since the beginning of time.
  void note(Clock::time_point now, std::int64_t total);
  Micros nap(Clock::time_point now, std::int64_t bytes_left) const;
  /// Only deliveries to peers are under way, which nobody here waits for.
  Micros drain_nap(Clock::time_point now) const;
  Micros idle_nap() const { return settings_.idle; }

 private:
  const Settings& settings_;
  Clock::time_point last_{}, last_arrival_{};
  std::int64_t total_ = 0;
  double bytes_per_us_ = 0;  // while data streams; slow to believe that the wire became slower
};

}  // namespace comm_core
