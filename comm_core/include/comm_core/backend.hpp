// The seam between the communicator users hold and whatever moves its bytes.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm_core/operation.hpp"
#include "comm_core/work.hpp"

namespace [[gnu::visibility("default")]] comm_core {

class Backend;

/// A message of the mailbox.
struct Letter {
  int source = 0;
  std::string payload;
};

/// A backend that is still being made: `backend` may be read once `work` is done (null: not a member).
struct Birth {
  std::shared_ptr<Work> work;
  std::shared_ptr<std::unique_ptr<Backend>> backend = std::make_shared<std::unique_ptr<Backend>>();
};

/// One group of ranks. Arguments were validated by the caller; nothing here blocks except receive_post.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  virtual std::string name() const = 0;
  /// The CUDA device whose memory it moves; none: host memory.
  virtual std::optional<int> device() const noexcept { return std::nullopt; }

  /// Carries the operation out after those submitted before it, then releases `memory` and finishes `work`.
  virtual void submit(Operation operation, std::shared_ptr<Work> work, KeepAlive memory) = 0;
  /// Collective. Runs after all operations submitted before it.
  virtual Birth split(std::optional<int> color, int key, std::shared_ptr<Work> work) = 0;
  /// The group of these ranks, of which this is one. Not collective: all of them give the same, and a name that no
  /// other part has.
  virtual Birth part(std::vector<int> ranks, std::string name, std::shared_ptr<Work> work);
  /// Sends a letter that no matching call waits for.
  virtual void post(int peer, std::string payload, std::shared_ptr<Work> work) = 0;
  /// The next letter; nullopt when `timeout` (see deadline_after()) passes or `interrupted` asks to return.
  virtual std::optional<Letter> receive_post(std::chrono::duration<double> timeout,
                                             const std::function<void()>& interrupted) = 0;
  /// Collective. Ends what is unfinished with a TransportError; only close() may follow. Finishes `work` once nothing
  /// of it is under way on any rank. A device's backend is called while other threads are inside submit(), which it
  /// frees if they wait for other ranks.
  virtual void abandon(std::shared_ptr<Work> work) = 0;
  /// Finishes `work` once everything submitted before is complete and the group's resources are given back.
  virtual void close(std::shared_ptr<Work> work) = 0;
};

/// What a backend's module offers the process.
class Provider {
 public:
  virtual ~Provider() = default;
  /// The group of all processes, or the one named by a handle of the backend's own kind.
  virtual Birth connect(std::optional<std::intptr_t> handle, std::shared_ptr<Work> work) = 0;
  /// Drains and stops; finalizes the runtime below only if this library initialised it. Idempotent.
  virtual void finalize() = 0;
  /// Ends the job, other processes included. Returns false when the runtime is not up.
  virtual bool abort(int code) noexcept = 0;
  /// Versions and paths, for reports.
  virtual std::map<std::string, std::string> describe() const = 0;
};

void register_provider(const std::string& name, std::unique_ptr<Provider> provider);
/// Null when no module registered the name.
Provider* find_provider(const std::string& name) noexcept;
/// Finalizes every registered provider.
void finalize_providers();
/// Asks every provider to end the job, then ends this process.
[[noreturn]] void abort_process(int code) noexcept;

std::unique_ptr<Backend> make_local_backend();

}  // namespace comm_core
