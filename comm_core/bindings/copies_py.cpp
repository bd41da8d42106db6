#include "comm_core/copies.hpp"
#include "register.hpp"

namespace comm_core::bindings {

void register_copies(py::module_& m) {
  m.def(
      "copy_past_caches",
      [](std::uintptr_t target, std::uintptr_t source, std::int64_t nbytes) {
        constexpr std::int64_t kShort = 32 * 1024;  // copied before another thread could have taken over
        auto* const to = reinterpret_cast<std::byte*>(target);
        const auto* const from = reinterpret_cast<const std::byte*>(source);
        if (nbytes <= kShort) return copy_past_caches(to, from, nbytes);
        const py::gil_scoped_release release;
        copy_past_caches(to, from, nbytes);
      },
      py::arg("target"), py::arg("source"), py::arg("nbytes"),
      "Copies bytes from one address to another, a large number past the caches. Both stay valid meanwhile; they are "
      "the same, or do not overlap.");
}

}  // namespace comm_core::bindings
