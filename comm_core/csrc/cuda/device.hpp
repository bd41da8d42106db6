// One CUDA device, and what is made on it.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>

#include "comm_core/errors.hpp"
#include "cuda_driver.hpp"

namespace comm_core {

/// A device's primary context, shared with torch and never given back.
class Device {
 public:
  Device(const CudaDriver& driver, int number)
      : driver_(driver), number_(number), context_(driver.primary_context(number)) {}

  const CudaDriver& driver() const noexcept { return driver_; }
  int number() const noexcept { return number_; }

  /// A few bytes on the device, the same for everybody, never given back: cuMemFree waits for all the device's kernels,
  /// and one of them may be an operation that only a thread which frees could abort. The device has to be current.
  CudaAddress scratch() const {
    std::call_once(allocated_, [this] { scratch_ = driver_.allocate(kScratchBytes); });
    return scratch_;
  }

  /// Makes the device current on this thread, for as long as it lives. While some other thread captures a graph, CUDA
  /// refuses a thread that asks for an event, and the capture fails with it, unless the thread's mode is relaxed: it
  /// says that nothing it does belongs into that graph, which holds here.
  class Current {
   public:
    explicit Current(const Device& device) : driver_(device.driver_) {
      driver_.push(device.context_);
      mode_ = driver_.exchange_capture_mode(kRelaxed);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    ~Current() {
      driver_.exchange_capture_mode(mode_);
      driver_.pop();
    }

   private:
    static constexpr int kRelaxed = 2;

    const CudaDriver& driver_;
    int mode_ = 0;
  };

 private:
  const CudaDriver& driver_;
  const int number_;
  const CudaContext context_;
  static constexpr std::size_t kScratchBytes = 256;
  mutable std::once_flag allocated_;
  mutable CudaAddress scratch_ = 0;
};

/// A moment in a stream: an event that is recorded at most once.
class Moment {
 public:
  /// The device has to be current.
  explicit Moment(std::shared_ptr<const Device> device)
      : device_(std::move(device)), event_(device_->driver().create_event()) {}
  Moment(const Moment&) = delete;
  Moment& operator=(const Moment&) = delete;
  /// On whatever thread looks last, which need not have any device current.
  ~Moment() {
    try {
      const Device::Current current(*device_);
      device_->driver().destroy(event_);
    } catch (const CudaError&) {  // a device that failed keeps nothing
    }
  }

  CudaEvent event() const noexcept { return event_; }
  const Device& device() const noexcept { return *device_; }

 private:
  const std::shared_ptr<const Device> device_;
  const CudaEvent event_;
};

}  // namespace comm_core
