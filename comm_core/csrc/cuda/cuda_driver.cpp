#include "cuda_driver.hpp"

#include "comm_core/errors.hpp"

namespace comm_core {
namespace {

constexpr int kSuccess = 0, kNoDevice = 100, kNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2;

}  // namespace

CudaDriver::CudaDriver(const std::string& path) : library_(path) {
  int (*initialise)(unsigned) = nullptr;
  int (*driver_version)(int*) = nullptr;
  int (*device_count)(int*) = nullptr;
  library_.bind(get_error_string_, "cuGetErrorString");
  library_.bind(initialise, "cuInit");
  library_.bind(driver_version, "cuDriverGetVersion");
  library_.bind(device_count, "cuDeviceGetCount");
  library_.bind(primary_context_retain_, "cuDevicePrimaryCtxRetain");
  library_.bind(context_push_, "cuCtxPushCurrent_v2");
  library_.bind(context_pop_, "cuCtxPopCurrent_v2");
  library_.bind(exchange_capture_mode_, "cuThreadExchangeStreamCaptureMode");
  library_.bind(priority_range_, "cuCtxGetStreamPriorityRange");
  library_.bind(stream_create_, "cuStreamCreateWithPriority");
  library_.bind(stream_destroy_, "cuStreamDestroy_v2");
  library_.bind(stream_is_capturing_, "cuStreamIsCapturing");
  library_.bind(stream_wait_, "cuStreamWaitEvent");
  library_.bind(event_create_, "cuEventCreate");
  library_.bind(event_destroy_, "cuEventDestroy_v2");
  library_.bind(event_record_, "cuEventRecord");
  library_.bind(event_query_, "cuEventQuery");
  library_.bind(allocate_, "cuMemAlloc_v2");
  library_.bind(module_load_, "cuModuleLoadData");
  library_.bind(module_function_, "cuModuleGetFunction");
  library_.bind(launch_, "cuLaunchKernel");
  const int status = initialise(0);
  if (status == kNoDevice) throw Unsupported(path + ": the CUDA driver sees no device");
  check(status, "cuInit");
  check(driver_version(&version_), "cuDriverGetVersion");
  check(device_count(&num_devices_), "cuDeviceGetCount");
}

CudaContext CudaDriver::primary_context(int device) const {
  CudaContext context = nullptr;
  check(primary_context_retain_(&context, device), "cuDevicePrimaryCtxRetain");
  return context;
}

void CudaDriver::push(CudaContext context) const { check(context_push_(context), "cuCtxPushCurrent"); }

void CudaDriver::pop() const noexcept {
  CudaContext before = nullptr;
  static_cast<void>(context_pop_(&before));
}

int CudaDriver::exchange_capture_mode(int mode) const noexcept {
  static_cast<void>(exchange_capture_mode_(&mode));
  return mode;
}

CudaStream CudaDriver::create_stream() const {
  int lowest = 0, highest = 0;
  check(priority_range_(&lowest, &highest), "cuCtxGetStreamPriorityRange");
  CudaStream stream = nullptr;
  check(stream_create_(&stream, kStreamNonBlocking, highest), "cuStreamCreateWithPriority");
  return stream;
}

void CudaDriver::destroy(CudaStream stream) const noexcept { static_cast<void>(stream_destroy_(stream)); }

bool CudaDriver::is_capturing(CudaStream stream) const {
  int status = 0;
  check(stream_is_capturing_(stream, &status), "cuStreamIsCapturing");
  return status != 0;
}

CudaEvent CudaDriver::create_event() const {
  CudaEvent event = nullptr;
  check(event_create_(&event, kEventDisableTiming), "cuEventCreate");
  return event;
}

void CudaDriver::destroy(CudaEvent event) const noexcept { static_cast<void>(event_destroy_(event)); }

void CudaDriver::record(CudaEvent event, CudaStream stream) const {
  check(event_record_(event, stream), "cuEventRecord");
}

void CudaDriver::wait(CudaStream stream, CudaEvent event) const {
  check(stream_wait_(stream, event, 0), "cuStreamWaitEvent");
}

bool CudaDriver::is_done(CudaEvent event) const {
  const int status = event_query_(event);
  if (status == kNotReady) return false;
  check(status, "cuEventQuery");
  return true;
}

CudaAddress CudaDriver::allocate(std::size_t bytes) const {
  CudaAddress address = 0;
  check(allocate_(&address, bytes), "cuMemAlloc");
  return address;
}

CudaModule CudaDriver::load_module(const void* image) const {
  CudaModule module = nullptr;
  check(module_load_(&module, image), "cuModuleLoadData");
  return module;
}

CudaFunction CudaDriver::function(CudaModule module, const char* name) const {
  CudaFunction function = nullptr;
  check(module_function_(&function, module, name), ("cuModuleGetFunction(" + std::string(name) + ")").c_str());
  return function;
}

void CudaDriver::launch(CudaFunction kernel, unsigned blocks, unsigned threads, CudaStream stream,
                        void** arguments) const {
  check(launch_(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr), "cuLaunchKernel");
}

void CudaDriver::check(int code, const char* call) const {
  if (code == kSuccess) return;
  const char* text = nullptr;
  if (get_error_string_(code, &text) != kSuccess || text == nullptr) text = "unknown error";
  throw CudaError(std::string(call) + ": " + text + " (CUDA code " + std::to_string(code) + ")", code);
}

}  // namespace comm_core
