#include <pybind11/stl.h>

#include "comm_core/backend.hpp"
#include "comm_core/communicator.hpp"
#include "memory.hpp"
#include "register.hpp"
#include "waiting.hpp"

namespace comm_core::bindings {

void register_backend(py::module_& m) {
  m.def("local", [] { return std::make_shared<Communicator>(make_local_backend(), "local"); }, "A group of one.");
  m.def(
      "connect",
      [](const std::string& provider, std::optional<std::intptr_t> handle) {
        return unlocked([&] { return connect(provider, handle, raise_signals); });
      },
      py::arg("provider"), py::arg("handle") = py::none(),
      "The group of all processes of a provider, or the one its handle names.");
  m.def(
      "finalize", [] { unlocked(finalize_providers); },
      "Drain and stop every provider; a runtime that was initialised by somebody else is left alone.");
  m.def(
      "abort", [](int code) { unlocked([&] { abort_process(code); }); }, py::arg("code"),
      "End the whole job at once with this exit code.");
  m.def(
      "describe",
      [](const std::string& provider) {
        const auto* found = find_provider(provider);
        return found == nullptr ? std::map<std::string, std::string>{} : found->describe();
      },
      py::arg("provider"), "Versions and paths of a provider.");
  m.def("interpreter_ends", &interpreter_ends, "Called last at exit: Python objects are not released any more.");
  m.def("release_finished", &release_finished, "Release the buffers of finished operations now.");
}

}  // namespace comm_core::bindings
