// Our kernels on one device: a fat binary that the driver loads, and launches of what is in it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "device.hpp"

namespace comm_core {

/// Threads and blocks of a launch; what decides them is pure, and in comm_core/cuda_kernels.py.
struct Geometry {
  unsigned blocks, threads;
};

/// Stays loaded as long as the process, as the device's context does.
class KernelImage {
 public:
  /// Throws CudaError where the driver or the device cannot use `image`.
  KernelImage(std::shared_ptr<const Device> device, const std::string& image);

  /// Enqueues `name`(source, target, count, scale) on `stream`; nothing waits. Throws CudaError, also for a name that
  /// is not in the image.
  void launch(const std::string& name, Geometry geometry, std::uintptr_t source, std::uintptr_t target,
              std::uint64_t count, double scale, std::uintptr_t stream);

 private:
  CudaFunction function(const std::string& name);

  const std::shared_ptr<const Device> device_;
  CudaModule module_;
  std::mutex mutex_;  // guards what follows
  std::map<std::string, CudaFunction> functions_;
};

}  // namespace comm_core
