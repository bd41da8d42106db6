// A CUDA driver and an NCCL that exist in memory only, under the names of the real ones. Streams are queues that advance
// when double_run() says so, in any order that events allow; a collective happens when all its ranks' streams have come
// to it. Every call is recorded. All ranks live in one process; "device memory" is the host's.
#include "cuda.hpp"
#include "nccl.hpp"

extern "C" {

// - What tests do

void double_clear() {
  const Lock lock(world().mutex);
  world().log.clear();
}
void double_reset() {
  const Lock lock(world().mutex);
  world().log.clear();
  world().failures.clear();
  world().hanging.clear();
  world().legacy.tasks.clear();
  for (Stream stream : world().streams) {
    stream->tasks.clear();
    stream->capturing = false;
  }
}
std::uintptr_t double_stream() {
  const Lock lock(world().mutex);
  const auto stream = new CUstream_st;
  stream->number = ++world().num_streams;
  world().streams.insert(stream);
  return reinterpret_cast<std::uintptr_t>(stream);
}
int double_number(Stream stream) { return stream->number; }
void double_capture(Stream stream, int on) { stream->capturing = on != 0; }
/// A kernel that copies.
void double_copy(Stream stream, void* to, const void* from, std::size_t bytes) {
  const Lock lock(world().mutex);
  stream->tasks.push_back([=] { return std::memcpy(to, from, bytes), true; });
}
/// A kernel that is the caller's function.
void double_call(Stream stream, void (*kernel)()) {
  const Lock lock(world().mutex);
  stream->tasks.push_back([=] { return kernel(), true; });
}
/// A kernel that takes so long, once its turn has come.
void double_nap(Stream stream, int milliseconds) {
  using Clock = std::chrono::steady_clock;
  const Lock lock(world().mutex);
  stream->tasks.push_back([milliseconds, until = Clock::time_point()]() mutable {
    if (until == Clock::time_point()) until = Clock::now() + std::chrono::milliseconds(milliseconds);
    return Clock::now() >= until;
  });
}
void double_fail(const char* function, int code) {
  const Lock lock(world().mutex);
  world().failures[function] = code;
}
void double_hang(const char* function) {
  const Lock lock(world().mutex);
  world().hanging.insert(function);
}
/// The communicator of this rank made last.
static Comm latest(int rank) {
  Comm last = nullptr;
  for (Comm comm : world().comms) {
    if (comm->rank == rank && (last == nullptr || comm->number > last->number)) last = comm;
  }
  return last;
}
/// Trouble that shows later.
void double_trouble(int rank, int code) {
  const Lock lock(world().mutex);
  if (Comm comm = latest(rank)) comm->trouble = code;
}
/// Holds up whoever asks for trouble, until it is let go.
void double_hold(int rank, int on) {
  const Lock lock(world().mutex);
  if (Comm comm = latest(rank)) comm->held = on != 0;
}
int double_held() { return world().num_held; }
void double_colors(const int* colors, int count) {
  const Lock lock(world().mutex);
  world().colors.assign(colors, colors + count);
}
int double_alive(const char* what) {
  const Lock lock(world().mutex);
  const std::string kind(what);
  return static_cast<int>(kind == "streams"  ? world().streams.size()
                          : kind == "events" ? world().events.size()
                          : kind == "comms"  ? world().comms.size()
                                             : world().memory.size());
}
std::size_t double_log(char* out, std::size_t size) {
  const Lock lock(world().mutex);
  std::string all;
  for (const auto& line : world().log) all += line + "\n";
  std::snprintf(out, size, "%s", all.c_str());
  return all.size();
}
/// Lets the device work, in an order that `seed` decides, until nothing moves. Returns how many tasks are stuck.
int double_run(unsigned seed) {
  std::mt19937 random(seed);
  for (int quiet = 0; quiet < 40; ++quiet) {
    const Lock lock(world().mutex);
    std::vector<Stream> all(world().streams.begin(), world().streams.end());
    all.push_back(&world().legacy);
    std::shuffle(all.begin(), all.end(), random);
    for (Stream stream : all) {
      if (stream->tasks.empty() || random() % 2 == 0) continue;
      if (!stream->tasks.front()()) continue;
      stream->tasks.pop_front();
      quiet = 0;
    }
  }
  const Lock lock(world().mutex);
  std::size_t left = world().legacy.tasks.size();
  for (Stream stream : world().streams) left += stream->tasks.size();
  return static_cast<int>(left);
}

}  // extern "C"
