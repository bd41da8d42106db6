#include "comm_core/halves.hpp"
#include "memory.hpp"
#include "register.hpp"

namespace comm_core::bindings {

void register_halves(py::module_& m) {
  m.def(
      "differ",
      [](const py::object& halves, const py::object& wide) {
        Arguments a;
        const auto some = a.view(halves, "halves"), others = a.view(wide, "wide");
        const py::gil_scoped_release release;
        return differ(some, others);
      },
      py::arg("halves"), py::arg("wide"),
      "Whether some 16-bit element, widened, is another number than the float32 one beside it. A NaN always is.");
}

}  // namespace comm_core::bindings
