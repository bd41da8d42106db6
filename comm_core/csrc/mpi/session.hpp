// MPI's life: who initialised it finalizes it.
#pragma once

#include <functional>

namespace comm_core {

/// Lives on the engine's thread, the only one that calls MPI.
class MpiSession {
 public:
  /// Initialises MPI unless somebody did; throws Unsupported when its threads support is below MPI_THREAD_SERIALIZED.
  /// `on_foreign_finalize` is called when somebody else finalizes MPI while it still works, on their thread.
  explicit MpiSession(std::function<void()> on_foreign_finalize);
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  bool is_ours() const noexcept { return ours_; }
  /// Finalizes MPI if it is ours.
  void close();

 private:
  std::function<void()> on_foreign_finalize_;
  bool ours_ = false;
  bool closing_ = false;
  int keyval_;
};

}  // namespace comm_core
