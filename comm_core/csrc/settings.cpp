#include "comm_core/settings.hpp"

#include <charconv>
#include <cstdlib>
#include <string>
#include <string_view>

#include "comm_core/errors.hpp"

namespace comm_core {
namespace {

std::int64_t read(const char* name, std::int64_t fallback, std::int64_t low, std::int64_t high) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return fallback;
  const std::string_view view(text);
  std::int64_t value = 0;
  const auto [rest, status] = std::from_chars(view.begin(), view.end(), value);
  if (status != std::errc{} || rest != view.end() || value < low || value > high) {
    throw InvalidUsage(std::string(name) + "=" + text + ": expected an integer from " + std::to_string(low) + " to " +
                       std::to_string(high));
  }
  return value;
}

Settings read_all() {
  Settings s;
  constexpr std::int64_t kNotGiven = 0;
  const auto segment = read("COMM_CORE_SEGMENT_BYTES", kNotGiven, 64, 1 << 30);
  s.segment_is_given = segment != kNotGiven;
  if (s.segment_is_given) s.segment_bytes = segment;
  s.segment_bytes -= s.segment_bytes % 8;  // whole elements of every dtype
  const auto window = read("COMM_CORE_WINDOW", kNotGiven, 1, 1024);
  s.window_is_given = window != kNotGiven;
  if (s.window_is_given) s.window = window;
  s.small_bytes = read("COMM_CORE_SMALL_BYTES", s.small_bytes, 0, 1 << 30);
  s.idle = std::chrono::milliseconds(read("COMM_CORE_IDLE_MS", s.idle.count(), 1, 1000));
  s.exit_patience = std::chrono::seconds(read("COMM_CORE_EXIT_SECONDS", s.exit_patience.count(), 1, 86400));
  return s;
}

}  // namespace

const Settings& settings() {
  static const Settings instance = read_all();
  return instance;
}

}  // namespace comm_core
