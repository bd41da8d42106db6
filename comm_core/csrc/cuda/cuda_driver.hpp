// The calls of the CUDA driver that we make, with its return codes as exceptions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "shared_library.hpp"

struct CUctx_st;
struct CUstream_st;
struct CUevent_st;
struct CUmod_st;
struct CUfunc_st;

namespace comm_core {

using CudaContext = CUctx_st*;
using CudaStream = CUstream_st*;
using CudaEvent = CUevent_st*;
using CudaModule = CUmod_st*;
using CudaFunction = CUfunc_st*;
using CudaAddress = std::uintptr_t;

/// libcuda, which comes with the driver and is the same whatever CUDA torch was built with. Unless said otherwise,
/// calls need a context to be current, and throw CudaError.
class CudaDriver {
 public:
  /// Loads it and initialises the driver. Throws Unsupported where there is no driver or no device.
  explicit CudaDriver(const std::string& path);

  const std::string& path() const noexcept { return library_.path(); }
  /// 13000 for 13.0.
  int version() const noexcept { return version_; }
  int num_devices() const noexcept { return num_devices_; }

  /// The primary context of a device, which torch uses too.
  CudaContext primary_context(int device) const;
  void push(CudaContext context) const;
  void pop() const noexcept;
  /// How this thread's calls fare while another thread captures a graph; gives the mode before. See Device::Current.
  int exchange_capture_mode(int mode) const noexcept;

  /// Of the highest priority; waits for no other stream by itself.
  CudaStream create_stream() const;
  void destroy(CudaStream stream) const noexcept;
  bool is_capturing(CudaStream stream) const;
  CudaEvent create_event() const;
  void destroy(CudaEvent event) const noexcept;
  void record(CudaEvent event, CudaStream stream) const;
  void wait(CudaStream stream, CudaEvent event) const;
  /// Whether everything before the event's last record() is done; true for one that was never recorded.
  bool is_done(CudaEvent event) const;
  CudaAddress allocate(std::size_t bytes) const;

  /// From a fat binary in memory, which the call copies.
  CudaModule load_module(const void* image) const;
  CudaFunction function(CudaModule module, const char* name) const;
  /// `arguments` points to each of the kernel's; they are read before this returns.
  void launch(CudaFunction kernel, unsigned blocks, unsigned threads, CudaStream stream, void** arguments) const;

 private:
  void check(int code, const char* call) const;

  SharedLibrary library_;
  int version_ = 0, num_devices_ = 0;

  int (*get_error_string_)(int, const char**);
  int (*primary_context_retain_)(CudaContext*, int);
  int (*context_push_)(CudaContext);
  int (*context_pop_)(CudaContext*);
  int (*exchange_capture_mode_)(int*);
  int (*priority_range_)(int*, int*);
  int (*stream_create_)(CudaStream*, unsigned, int);
  int (*stream_destroy_)(CudaStream);
  int (*stream_is_capturing_)(CudaStream, int*);
  int (*stream_wait_)(CudaStream, CudaEvent, unsigned);
  int (*event_create_)(CudaEvent*, unsigned);
  int (*event_destroy_)(CudaEvent);
  int (*event_record_)(CudaEvent, CudaStream);
  int (*event_query_)(CudaEvent);
  int (*allocate_)(CudaAddress*, std::size_t);
  int (*module_load_)(CudaModule*, const void*);
  int (*module_function_)(CudaFunction*, CudaModule, const char*);
  int (*launch_)(CudaFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CudaStream, void**,
                 void**);
};

}  // namespace comm_core
