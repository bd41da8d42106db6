#include "comm_core/blockwise.hpp"
#include "register.hpp"

namespace comm_core::bindings {

void register_blockwise(py::module_& m) {
  m.def("blockwise_bytes", &blockwise_bytes, py::arg("count"), py::arg("bits"),
        "How many bytes `count` numbers become in 8 or 4 bits, with a scale for each block of 128.");
  m.def(
      "encode_blockwise",
      [](std::uintptr_t wire, std::uintptr_t values, std::int64_t count, int bits, DType dtype) {
        encode_blockwise(dtype, reinterpret_cast<std::byte*>(wire), reinterpret_cast<const std::byte*>(values), count,
                         bits);
      },
      py::arg("wire"), py::arg("values"), py::arg("count"), py::arg("bits"), py::arg("dtype"),
      py::call_guard<py::gil_scoped_release>(), "Write `count` numbers of one address as bytes to another.");
  m.def(
      "decode_blockwise",
      [](std::uintptr_t values, std::uintptr_t wire, std::int64_t count, int bits, DType dtype) {
        decode_blockwise(dtype, reinterpret_cast<std::byte*>(values), reinterpret_cast<const std::byte*>(wire), count,
                         bits);
      },
      py::arg("values"), py::arg("wire"), py::arg("count"), py::arg("bits"), py::arg("dtype"),
      py::call_guard<py::gil_scoped_release>(), "The inverse of `encode_blockwise`.");
}

}  // namespace comm_core::bindings
