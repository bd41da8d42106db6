#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include "comm_core/types.hpp"
#include "memory.hpp"
#include "register.hpp"

namespace comm_core::bindings {

void register_types(py::module_& m) {
  py::native_enum<DType>(m, "DType", "enum.Enum", "Type of the elements of a buffer.")
      .value("FLOAT16", DType::kFloat16)
      .value("BFLOAT16", DType::kBFloat16)
      .value("FLOAT32", DType::kFloat32)
      .value("FLOAT64", DType::kFloat64)
      .value("INT8", DType::kInt8)
      .value("INT16", DType::kInt16)
      .value("INT32", DType::kInt32)
      .value("INT64", DType::kInt64)
      .value("UINT8", DType::kUInt8)
      .value("BOOL", DType::kBool)
      .finalize();
  const auto itemsize = py::cpp_function([](DType t) { return item_size(t); }, py::name("itemsize"));
  const auto property = py::module_::import("builtins").attr("property");
  py::setattr(m.attr("DType"), "itemsize", property(itemsize, py::none(), py::none(), "Bytes of one element."));

  py::native_enum<ReduceOp>(m, "ReduceOp", "enum.Enum", "How contributions are combined.")
      .value("SUM", ReduceOp::kSum)
      .value("AVG", ReduceOp::kAvg)
      .value("MIN", ReduceOp::kMin)
      .value("MAX", ReduceOp::kMax)
      .value("PROD", ReduceOp::kProd)
      .finalize();

  py::class_<PyBuffer>(m, "Buffer", "Contiguous elements at an address. Does not own them, but keeps `owner` alive.")
      .def(py::init(&make_buffer), py::arg("address"), py::arg("count"), py::arg("dtype"), py::kw_only(),
           py::arg("readonly") = false, py::arg("owner") = py::none(), py::arg("device") = py::none(),
           py::arg("stream") = 0)
      .def_property_readonly("address",
                             [](const PyBuffer& b) { return reinterpret_cast<std::uintptr_t>(b.buffer.data); })
      .def_property_readonly("count", [](const PyBuffer& b) { return b.buffer.count; })
      .def_property_readonly("dtype", [](const PyBuffer& b) { return b.buffer.dtype; })
      .def_property_readonly("readonly", [](const PyBuffer& b) { return b.buffer.readonly; })
      .def_property_readonly("device", [](const PyBuffer& b) { return b.buffer.device; })
      .def_property_readonly("stream", [](const PyBuffer& b) { return b.buffer.stream; })
      .def_property_readonly("nbytes", [](const PyBuffer& b) { return b.buffer.bytes(); })
      .def_property_readonly("owner", [](const PyBuffer& b) { return b.owner; });
}

}  // namespace comm_core::bindings
