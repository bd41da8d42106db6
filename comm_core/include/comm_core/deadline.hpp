// The one rule for a caller's timeout.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "comm_core/errors.hpp"

namespace comm_core {

/// When a wait that begins now gives up. time_point::max(): never, for which callers pass nothing or infinity; a
/// century is no different. Throws InvalidUsage where `timeout` is negative or not a number.
inline std::chrono::steady_clock::time_point deadline_after(std::optional<std::chrono::duration<double>> timeout,
                                                            const char* who) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::duration<double> kZero{0}, kCentury{100 * 365 * 86400.0};
  if (timeout && !(*timeout >= kZero)) {
    throw InvalidUsage(std::string(who) + ": timeout is " + std::to_string(timeout->count()) +
                       "; pass seconds, 0 or more, or None to wait for ever");
  }
  if (!timeout || *timeout >= kCentury) return Clock::time_point::max();
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(*timeout);
}

}  // namespace comm_core
