// One CUDA device, and what is made on it.
#pragma once

#include <memory>
#include <utility>

#include "cuda_driver.hpp"

namespace comm_core {

/// A device's primary context, shared with torch and never given back.
class Device {
 public:
  Device(const CudaDriver& driver, int number)
      : driver_(driver), number_(number), context_(driver.primary_context(number)) {}

  const CudaDriver& driver() const noexcept { return driver_; }
  int number() const noexcept { return number_; }

  /// Makes the device current on this thread, for as long as it lives.
  class Current {
   public:
    explicit Current(const Device& device) : driver_(device.driver_) { driver_.push(device.context_); }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    ~Current() { driver_.pop(); }

   private:
    const CudaDriver& driver_;
  };

 private:
  const CudaDriver& driver_;
  const int number_;
  const CudaContext context_;
};

/// A moment in a stream: an event that is recorded at most once.
class Moment {
 public:
  /// The device has to be current.
  explicit Moment(std::shared_ptr<const Device> device)
      : device_(std::move(device)), event_(device_->driver().create_event()) {}
  Moment(const Moment&) = delete;
  Moment& operator=(const Moment&) = delete;
  ~Moment() { device_->driver().destroy(event_); }

  CudaEvent event() const noexcept { return event_; }
  const Device& device() const noexcept { return *device_; }

 private:
  const std::shared_ptr<const Device> device_;
  const CudaEvent event_;
};

}  // namespace comm_core
