#include "comm_core/copies.hpp"
#include "register.hpp"

namespace comm_core::bindings {

void register_copies(py::module_& m) {
  m.def(
      "copy_plus_zero",
      [](std::uintptr_t target, std::uintptr_t source, std::int64_t count, DType dtype) {
        constexpr std::int64_t kShort = 8192;  // elements; copied before another thread could have taken over
        auto* const to = reinterpret_cast<std::byte*>(target);
        const auto* const from = reinterpret_cast<const std::byte*>(source);
        if (count <= kShort) return copy_plus_zero(dtype, to, from, count);
        const py::gil_scoped_release release;
        copy_plus_zero(dtype, to, from, count);
      },
      py::arg("target"), py::arg("source"), py::arg("count"), py::arg("dtype"),
      "target = source + 0.0, `count` elements of a floating-point type from one address to another: -0.0 becomes "
      "+0.0. Both stay valid meanwhile; they are the same, or do not overlap.");
}

}  // namespace comm_core::bindings
