// MPI's life: who initialised it finalizes it.
#pragma once

#include <atomic>
#include <functional>

namespace comm_core {

/// Lives on the engine's thread, the only one that calls MPI.
class MpiSession {
 public:
  /// Initialises MPI unless somebody did. Throws Unsupported when its thread support is below MPI_THREAD_SERIALIZED, or
  /// below MPI_THREAD_MULTIPLE where somebody else initialised it: they go on calling it, at the latest to finalize it.
  /// `on_foreign_finalize` is called when somebody else finalizes MPI while it still works, on their thread: whoever
  /// initialised it, and with mpi4py also whoever did not.
  explicit MpiSession(std::function<void()> on_foreign_finalize);
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  bool is_ours() const noexcept { return ours_; }
  /// Finalizes MPI if it is ours and nobody else is about to.
  void close();

 private:
  std::function<void()> on_foreign_finalize_;
  bool ours_ = false;
  std::atomic<bool> closing_{false}, foreign_{false};  // we, or somebody else, began to finalize
  int keyval_;
};

}  // namespace comm_core
