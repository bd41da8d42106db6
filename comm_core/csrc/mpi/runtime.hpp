// The process's MPI engine.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "../engine/runtime.hpp"
#include "driver.hpp"

namespace comm_core {

/// MPI's own callbacks may reach it until the process ends.
class MpiRuntime final : public Runtime {
 public:
  Birth connect(std::optional<std::intptr_t> handle, std::shared_ptr<Work> work) override;
  bool abort(int code) noexcept override;
  std::map<std::string, std::string> describe() const override;

 protected:
  std::unique_ptr<Driver> make_driver() override;
  void close_groups() override { driver_->close_groups(); }

 private:
  void foreign_finalize() noexcept;

  MpiDriver* driver_ = nullptr;
};

}  // namespace comm_core
