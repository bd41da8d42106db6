// The process's TCP engine.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "../engine/runtime.hpp"
#include "driver.hpp"

namespace comm_core {

class TcpRuntime final : public Runtime {
 public:
  /// The group of all ranks of a mesh.
  Birth join(Mesh mesh, std::shared_ptr<Work> work);

  /// Not by a handle: see join().
  Birth connect(std::optional<std::intptr_t> handle, std::shared_ptr<Work> work) override;
  /// Peers learn of this process's end by their connections to it.
  bool abort(int) noexcept override { return false; }
  std::map<std::string, std::string> describe() const override { return {}; }

 protected:
  std::unique_ptr<Driver> make_driver() override;
  void close_groups() override { driver_->close_groups(); }

 private:
  TcpDriver* driver_ = nullptr;
};

}  // namespace comm_core
