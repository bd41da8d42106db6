// Waiting for others, on Python's threads.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <optional>
#include <type_traits>
#include <utility>

#include "comm_core/work.hpp"

namespace comm_core::bindings {

/// Takes the GIL back. A daemon thread that wants it after the interpreter went away stays there for ever instead.
void lock_again(PyThreadState* state);

/// Calls `act` without the GIL. Not by a guard with a destructor: CPython before 3.14 ends a daemon thread where it
/// waits for the GIL of an interpreter that goes away, by unwinding it, and unwinding out of a destructor ends the
/// process.
template <class Act>
auto unlocked(const Act& act) {
  using Result = decltype(act());
  auto* const state = PyEval_SaveThread();
  std::exception_ptr error;
  std::conditional_t<std::is_void_v<Result>, char, std::optional<Result>> result{};
  try {
    if constexpr (std::is_void_v<Result>) {
      act();
    } else {
      result.emplace(act());
    }
  } catch (...) {
    error = std::current_exception();
  }
  lock_again(state);
  if (error) std::rethrow_exception(error);
  if constexpr (!std::is_void_v<Result>) return std::move(*result);
}

/// Releases the GIL; Ctrl-C works.
void wait_for(const Work& work, std::optional<double> timeout);

/// Raises what Python's signal handlers raise, on the main thread, the only one that they run on; called from waits
/// that have released the GIL.
void raise_signals();

}  // namespace comm_core::bindings
