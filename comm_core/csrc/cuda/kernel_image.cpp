#include "kernel_image.hpp"

#include <utility>

namespace comm_core {

KernelImage::KernelImage(std::shared_ptr<const Device> device, const std::string& image) : device_(std::move(device)) {
  const Device::Current current(*device_);
  module_ = device_->driver().load_module(image.data());
}

CudaFunction KernelImage::function(const std::string& name) {
  const std::lock_guard lock(mutex_);
  auto& found = functions_[name];
  if (found == nullptr) found = device_->driver().function(module_, name.c_str());
  return found;
}

void KernelImage::launch(const std::string& name, Geometry geometry, std::uintptr_t source, std::uintptr_t target,
                         std::uint64_t count, double scale, std::uintptr_t stream) {
  const Device::Current current(*device_);
  void* arguments[] = {&source, &target, &count, &scale};
  device_->driver().launch(function(name), geometry.blocks, geometry.threads, reinterpret_cast<CudaStream>(stream),
                           arguments);
}

}  // namespace comm_core
