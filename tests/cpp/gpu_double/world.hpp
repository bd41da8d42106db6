// What there is in memory: streams, events, communicators, and the record of calls.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {
using Step = std::function<bool()>;  // true once it is over
}

struct CUstream_st {
  int number = 0;
  bool capturing = false;
  std::deque<Step> tasks;
};
struct CUevent_st {
  int number = 0;
  void* context = nullptr;  // current when it was made; none: a test's own event
  std::shared_ptr<bool> passed;
};
struct Call {
  std::string name;
  const char* send = nullptr;
  char* recv = nullptr;
  std::size_t count = 0;
  int type = 0, op = 0, root = 0, rank = 0;
};
struct Meeting {
  std::vector<Call> calls;
  bool over = false;
};
struct Message {
  const char* data;
  std::size_t bytes;
  std::shared_ptr<bool> taken;
};
struct Clique {
  int size = 0;
  std::map<int, Meeting> meetings;  // by position in the order of issue
  std::map<std::pair<int, int>, std::deque<Message>> mail;
  std::map<std::pair<int, int>, std::shared_ptr<Clique>> parts;  // by split and color
};
struct ncclComm {
  int number = 0, rank = 0, num_issued = 0, num_splits = 0, trouble = 0;
  bool aborted = false;
  std::atomic<bool> held{false};  // who asks it for errors waits
  std::shared_ptr<Clique> clique;
};

namespace {

using Stream = CUstream_st*;
using Event = CUevent_st*;
using Comm = ncclComm*;

struct World {
  std::recursive_mutex mutex;
  std::vector<std::string> log;
  std::map<std::string, int> failures;  // what the next call of a function returns
  std::set<std::string> hanging;        // calls that return only when their communicator is aborted
  std::map<std::string, std::shared_ptr<Clique>> cliques;
  std::set<Stream> streams;
  std::set<Event> events;
  std::set<Comm> comms;
  std::set<void*> memory;
  std::set<std::string> names;  // of kernels
  std::vector<int> colors;
  CUstream_st legacy;
  int num_streams = 0, num_events = 0, num_comms = 0, num_ids = 0;
  std::atomic<int> num_held{0};  // threads that wait so
};

World& world() {
  static auto* const instance = new World;
  return *instance;
}

using Lock = std::lock_guard<std::recursive_mutex>;

thread_local int depth = 0;
thread_local std::vector<void*> contexts;  // current ones of this thread
thread_local int capture_mode = 0;  // of this thread, while another captures: 0 global, 2 relaxed
thread_local std::vector<std::pair<Stream, Step>> grouped;

std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char* format, ...) {
  char line[256];
  va_list rest;
  va_start(rest, format);
  std::vsnprintf(line, sizeof line, format, rest);
  va_end(rest);
  return line;
}

/// Records the call and says what it should return.
int called(const std::string& name, const std::string& line) {
  auto& w = world();
  w.log.push_back(line);
  const auto found = w.failures.find(name);
  if (found == w.failures.end()) return 0;
  const int code = found->second;
  w.failures.erase(found);
  return code;
}

Stream real(Stream stream) { return stream == nullptr ? &world().legacy : stream; }

}  // namespace
