// The CUDA driver: its functions that comm_core calls.
#pragma once

#include "world.hpp"

extern "C" {

int cuGetErrorString(int code, const char** out) { return *out = code == 700 ? "illegal address" : "error", 0; }
int cuInit(unsigned) { return called("cuInit", "init"); }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGetCount(int* count) { return *count = 8, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) {
  return *context = reinterpret_cast<void*>(static_cast<std::uintptr_t>(device + 1)), 0;
}
int cuCtxPushCurrent_v2(void* context) { return contexts.push_back(context), 0; }
int cuCtxPopCurrent_v2(void**) { return contexts.pop_back(), 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) { return std::swap(*mode, capture_mode), 0; }
int cuCtxGetStreamPriorityRange(int* lowest, int* highest) { return *lowest = 0, *highest = -5, 0; }
int cuStreamCreateWithPriority(Stream* stream, unsigned flags, int priority) {
  const Lock lock(world().mutex);
  *stream = new CUstream_st;
  (*stream)->number = ++world().num_streams;
  world().streams.insert(*stream);
  return called("cuStreamCreateWithPriority",
                text("create s%d flags=%u priority=%d", (*stream)->number, flags, priority));
}
int cuStreamDestroy_v2(Stream stream) {
  const Lock lock(world().mutex);
  world().streams.erase(stream);
  return called("cuStreamDestroy", text("destroy s%d", stream->number));
}
int cuStreamIsCapturing(Stream stream, int* status) { return *status = real(stream)->capturing ? 1 : 0, 0; }
int cuStreamWaitEvent(Stream stream, Event event, unsigned) {
  const Lock lock(world().mutex);
  const auto passed = event->passed;
  if (passed) real(stream)->tasks.push_back([passed] { return *passed; });
  return called("cuStreamWaitEvent", text("wait s%d e%d", real(stream)->number, event->number));
}
int cuEventCreate(Event* event, unsigned flags) {
  const Lock lock(world().mutex);
  *event = new CUevent_st;
  (*event)->number = ++world().num_events;
  (*event)->context = contexts.empty() ? nullptr : contexts.back();
  world().events.insert(*event);
  return flags == 2 ? 0 : 1;
}
int cuEventDestroy_v2(Event event) {
  const Lock lock(world().mutex);
  if (event->context != nullptr && contexts.empty()) return 201;  // CUDA_ERROR_INVALID_CONTEXT
  world().events.erase(event);
  delete event;
  return 0;
}
int cuEventRecord(Event event, Stream stream) {
  const Lock lock(world().mutex);
  const auto passed = event->passed = std::make_shared<bool>(false);
  real(stream)->tasks.push_back([passed] { return *passed = true; });
  return called("cuEventRecord", text("record e%d s%d", event->number, real(stream)->number));
}
int cuEventQuery(Event event) {
  const Lock lock(world().mutex);
  if (capture_mode != 2 &&
      std::any_of(world().streams.begin(), world().streams.end(), [](Stream stream) { return stream->capturing; }))
    return world().log.push_back("a capture is spoilt"), 900;
  const auto found = world().failures.find("cuEventQuery");
  if (found != world().failures.end()) return found->second;  // a device that failed stays so
  return event->passed && !*event->passed ? 600 : 0;
}
int cuMemAlloc_v2(std::uintptr_t* address, std::size_t bytes) {
  const Lock lock(world().mutex);
  void* const memory = ::operator new(bytes);
  std::memset(memory, 0, bytes);
  world().memory.insert(memory);
  return *address = reinterpret_cast<std::uintptr_t>(memory), 0;
}

// - Kernels: launches are recorded, and a module knows every name

int cuModuleLoadData(void** module, const void* image) {
  const Lock lock(world().mutex);
  unsigned magic = 0;
  std::memcpy(&magic, image, sizeof magic);
  *module = &world();
  return called("cuModuleLoadData", text("load module %x", magic));
}
int cuModuleGetFunction(const char** function, void*, const char* name) {
  const Lock lock(world().mutex);
  *function = world().names.insert(name).first->c_str();
  return called("cuModuleGetFunction", text("function %s", name));
}
int cuLaunchKernel(const char* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                   unsigned shared, Stream stream, void** arguments, void**) {
  const Lock lock(world().mutex);
  std::uint64_t source = 0, target = 0, count = 0;
  double scale = 0;
  std::memcpy(&source, arguments[0], 8);
  std::memcpy(&target, arguments[1], 8);
  std::memcpy(&count, arguments[2], 8);
  std::memcpy(&scale, arguments[3], 8);
  return called("cuLaunchKernel",
                text("launch %s s%d %ux%ux%u of %u, shared=%u, source=%llu target=%llu count=%llu scale=%g", function,
                     real(stream)->number, x, y, z, threads, shared, static_cast<unsigned long long>(source),
                     static_cast<unsigned long long>(target), static_cast<unsigned long long>(count), scale));
}

}  // extern "C"
