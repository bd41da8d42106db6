// The process's NCCL: its libraries, its groups, and the two threads beside the callers'.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../engine/engine.hpp"
#include "comm_core/backend.hpp"
#include "group.hpp"

namespace comm_core {

/// Exists once and is never destroyed. Operations are submitted on their callers' threads. One thread watches all
/// groups: it lets memory go and finds errors. Another, the clerk, makes and closes groups, which blocks until other
/// ranks do. Both start with the first group, and again with the first one after finalize().
class NcclRuntime final : public Provider {
 public:
  /// Loads the libraries; the same ones when it is called again. Throws Unsupported where they will not do.
  void load(const std::string& nccl_path, const std::string& cuda_path);
  /// Throws Unsupported when there is no such device.
  void require_device(int device);
  UniqueId unique_id();
  /// The group of all ranks that give the same id. Throws InvalidUsage for a rank or size that are none.
  Birth join(const UniqueId& id, int rank, int size, int device, std::shared_ptr<Work> work);

  Birth connect(std::optional<std::intptr_t> handle, std::shared_ptr<Work> work) override;
  void finalize() override;
  bool abort(int code) noexcept override;
  std::map<std::string, std::string> describe() const override;

  /// For groups' backends.
  Birth split(std::shared_ptr<NcclGroup> group, std::optional<int> color, int key, std::shared_ptr<Work> work);
  void close(std::shared_ptr<NcclGroup> group, std::shared_ptr<Work> work);

 private:
  class Watch;
  class Clerk;

  void start();
  std::shared_ptr<Engine> clerk() const;
  Birth bear(std::shared_ptr<Work> work, std::function<std::shared_ptr<NcclGroup>()> make);
  std::shared_ptr<const Device> device(int number);
  std::vector<std::shared_ptr<NcclGroup>> groups() const;
  /// A group that failed outlives its closing until the device has let go of its buffers.
  void forget_closed();

  mutable std::mutex mutex_;  // guards what follows
  std::unique_ptr<CudaDriver> cuda_;
  std::unique_ptr<NcclApi> nccl_;
  std::map<int, std::shared_ptr<const Device>> devices_;
  std::vector<std::shared_ptr<NcclGroup>> groups_;
  std::shared_ptr<Engine> clerk_, watch_;  // none before the first group, and after finalize()
  // Those of a finalize() that gave up on them: their threads go on.
  std::optional<std::pair<std::shared_ptr<Engine>, std::shared_ptr<Engine>>> stuck_;
};

}  // namespace comm_core
