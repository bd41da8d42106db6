// What can be tuned from the environment, read once and validated.
#pragma once

#include <chrono>
#include <cstdint>

namespace [[gnu::visibility("default")]] comm_core {

struct Settings {
  /// COMM_CORE_SEGMENT_BYTES: large transfers travel in messages of this size. The default stays below the 64 KB
  /// eager limit of Open MPI's TCP transport: above it every message waits for a clear-to-send.
  std::int64_t segment_bytes = 60 * 1024;
  bool segment_is_given = false;
  /// COMM_CORE_WINDOW: messages in flight between two ranks. Unless it is given, more where a message takes long.
  std::int64_t window = 12;
  bool window_is_given = false;
  /// COMM_CORE_SMALL_BYTES: up to this many bytes per rank an operation takes the single-step algorithm.
  std::int64_t small_bytes = 32 * 1024;
  /// COMM_CORE_IDLE_MS: how often an engine without work looks for mail.
  std::chrono::milliseconds idle{5};
  /// COMM_CORE_EXIT_SECONDS: how long shutdown waits for operations that peers never complete.
  std::chrono::seconds exit_patience{60};
};

/// The process's settings. Throws InvalidUsage, naming variable and value, at the first call if one does not parse.
const Settings& settings();

}  // namespace comm_core
