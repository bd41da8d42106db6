#include "pace.hpp"

#include <algorithm>

namespace comm_core {
namespace {

using Micros = Pace::Micros;

constexpr Micros kShortest{20}, kLongestWait{500}, kLongestStream{1000}, kLongestDrain{1000};

Micros eighth_of(Pace::Clock::duration waited, Micros longest) {
  return std::clamp(std::chrono::duration_cast<Micros>(waited) / 8, kShortest, longest);
}

}  // namespace

void Pace::note(Clock::time_point now, std::int64_t total) {
  last_ = now;
  const auto arrived = total - total_;
  if (arrived == 0) return;
  const double us = std::chrono::duration<double, std::micro>(now - last_arrival_).count();
  constexpr double kLull = 5'000;  // us without arrivals: somebody was late, which says nothing about the wire's speed
  constexpr double kFaster = 0.5, kSlower = 0.1;
  if (us < kLull && us > 0) {
    const double rate = static_cast<double>(arrived) / us;
    bytes_per_us_ += (rate > bytes_per_us_ ? kFaster : kSlower) * (rate - bytes_per_us_);
  }
  last_arrival_ = now;
  total_ = total;
}

Micros Pace::nap(Clock::time_point now, std::int64_t bytes_left) const {
  const auto waiting = eighth_of(now - last_, kLongestWait);
  constexpr Micros kStreams{2000};  // since the last arrival; later, nobody knows when the next one comes
  if (bytes_per_us_ == 0 || now - last_arrival_ > kStreams || bytes_left <= settings_.segment_bytes) return waiting;
  const auto window = static_cast<double>(settings_.segment_bytes * settings_.window) / 4;
  const double due = std::min(window, static_cast<double>(bytes_left) / 2) / bytes_per_us_;
  const auto streaming = Micros(static_cast<std::int64_t>(std::min(due, 1e6)));
  return std::max(waiting, std::min(streaming, kLongestStream));
}

Micros Pace::drain_nap(Clock::time_point now) const { return eighth_of(now - last_, kLongestDrain); }

}  // namespace comm_core
