// comm_core._cuda: our kernels; importing it loads nothing.
#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "comm_core/errors.hpp"
#include "comm_core/process.hpp"
#include "kernel_image.hpp"

namespace py = pybind11;

namespace {

/// One driver per process, kept for good: images refer to it.
const comm_core::CudaDriver& driver(const std::string& path) {
  static auto* const instance = new comm_core::CudaDriver(path);
  if (instance->path() != path) {
    throw comm_core::InvalidUsage("the CUDA driver was loaded from " + instance->path() +
                                  " already; it cannot be loaded from " + path + " too");
  }
  return *instance;
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  using namespace comm_core;
  m.doc() = "comm_core's CUDA kernels. Importing it loads nothing.";
  py::class_<KernelImage, std::shared_ptr<KernelImage>>(m, "KernelImage", "A fat binary on one device.")
      .def(py::init([](const std::string& cuda, int device, const py::bytes& image) {
             require_parent_process();
             const auto& found = driver(cuda);
             if (device < 0 || device >= found.num_devices()) {
               throw Unsupported("there is no CUDA device " + std::to_string(device) + "; " +
                                 std::to_string(found.num_devices()) + " can be seen");
             }
             return std::make_shared<KernelImage>(std::make_shared<Device>(found, device), std::string(image));
           }),
           py::arg("cuda"), py::arg("device"), py::arg("image"))
      .def(
          "launch",
          [](KernelImage& image, const std::string& name, unsigned blocks, unsigned threads, std::uintptr_t source,
             std::uintptr_t target, std::uint64_t count, double scale,
             std::uintptr_t stream) { image.launch(name, {blocks, threads}, source, target, count, scale, stream); },
          py::arg("name"), py::kw_only(), py::arg("blocks"), py::arg("threads"), py::arg("source"), py::arg("target"),
          py::arg("count"), py::arg("scale"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}
