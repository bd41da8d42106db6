// What we take the CUDA driver's functions and numbers for, against its header. Compiled, never run.
#include <cuda.h>

#include "../../../comm_core/csrc/cuda/cuda_driver.cpp"
#include "../../../comm_core/csrc/cuda/device.hpp"
#include "matches.hpp"

using Ours = comm_core::CudaDriver;
#define CHECK(member, function) static_assert(matches<decltype(Ours::member), decltype(&function)>, #function)

CHECK(get_error_string_, cuGetErrorString);
CHECK(primary_context_retain_, cuDevicePrimaryCtxRetain);
CHECK(context_push_, cuCtxPushCurrent);
CHECK(context_pop_, cuCtxPopCurrent);
CHECK(exchange_capture_mode_, cuThreadExchangeStreamCaptureMode);
CHECK(priority_range_, cuCtxGetStreamPriorityRange);
CHECK(stream_create_, cuStreamCreateWithPriority);
CHECK(stream_destroy_, cuStreamDestroy);
CHECK(stream_is_capturing_, cuStreamIsCapturing);
CHECK(stream_wait_, cuStreamWaitEvent);
CHECK(event_create_, cuEventCreate);
CHECK(event_destroy_, cuEventDestroy);
CHECK(event_record_, cuEventRecord);
CHECK(event_query_, cuEventQuery);
CHECK(allocate_, cuMemAlloc);
CHECK(module_load_, cuModuleLoadData);
CHECK(module_function_, cuModuleGetFunction);
CHECK(launch_, cuLaunchKernel);
static_assert(matches<int (*)(unsigned), decltype(&cuInit)>);
static_assert(matches<int (*)(int*), decltype(&cuDriverGetVersion)>);
static_assert(matches<int (*)(int*), decltype(&cuDeviceGetCount)>);

namespace comm_core {
static_assert(kSuccess == CUDA_SUCCESS && kNoDevice == CUDA_ERROR_NO_DEVICE && kNotReady == CUDA_ERROR_NOT_READY);
static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING && kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(CU_STREAM_CAPTURE_STATUS_NONE == 0 && Device::Current::kRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
}  // namespace comm_core
