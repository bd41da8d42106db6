// Python objects that the engine keeps alive, and how their memory is described.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "comm_core/types.hpp"

namespace comm_core::bindings {

namespace py = pybind11;

/// comm_core.Buffer: memory by address, and whoever owns it.
struct PyBuffer {
  Buffer buffer;
  py::object owner;
};

PyBuffer make_buffer(std::uintptr_t address, std::int64_t count, DType dtype, bool readonly, py::object owner,
                     std::optional<int> device, std::uintptr_t stream);

/// The memory of the arguments of one operation, and what keeps it alive until the engine lets go.
///
/// [Note: finalizers] Whoever lets go of memory last may be a thread without the GIL, or hold locks of this library
/// that the finalizer of a Python object wants too. So memory is only put aside there, and objects are released where
/// neither is the case: when the arguments of an operation go out of scope, after a wait, or by the interpreter itself.
class Arguments {
 public:
  Arguments();
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;
  /// Releases what can be: needs the GIL, and no lock of ours may be held.
  ~Arguments();
  /// Any object with the buffer protocol, or a comm_core.Buffer. Throws InvalidUsage or Unsupported, naming `name`.
  Buffer view(const py::object& object, const char* name);
  KeepAlive keep_alive() const { return held_; }

 private:
  struct Held;
  std::shared_ptr<Held> held_;
};

/// Releases the objects that finished operations have let go. Needs the GIL.
void release_finished() noexcept;
/// From here on nothing is released any more: the interpreter is going away.
void interpreter_ends() noexcept;

}  // namespace comm_core::bindings
