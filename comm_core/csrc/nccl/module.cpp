// comm_core._nccl: importing it makes the NCCL backend known; it loads and starts nothing.
#include <pybind11/pybind11.h>

#include <cstring>
#include <memory>
#include <string>

#include "comm_core/communicator.hpp"
#include "comm_core/errors.hpp"
#include "runtime.hpp"

namespace py = pybind11;

namespace {

void raise_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

comm_core::UniqueId id_from(const std::string& bytes) {
  comm_core::UniqueId id{};
  if (bytes.size() != sizeof id.bytes) {
    throw comm_core::InvalidUsage("nccl: an id has " + std::to_string(sizeof id.bytes) + " bytes, this one " +
                                  std::to_string(bytes.size()));
  }
  std::memcpy(id.bytes, bytes.data(), sizeof id.bytes);
  return id;
}

}  // namespace

PYBIND11_MODULE(_nccl, m) {
  using namespace comm_core;
  m.doc() = "The NCCL backend of comm_core. Importing it registers the backend and loads nothing.";
  auto* const runtime = new NcclRuntime;
  register_provider("nccl", std::unique_ptr<Provider>(runtime));
  m.def(
      "load", [runtime](const std::string& nccl, const std::string& cuda) { runtime->load(nccl, cuda); },
      py::arg("nccl"), py::arg("cuda"), py::call_guard<py::gil_scoped_release>(), "Load the libraries.");
  m.def(
      "require_device", [runtime](int device) { runtime->require_device(device); }, py::arg("device"),
      "Raise Unsupported when there is no such device.");
  m.def(
      "unique_id",
      [runtime] {
        const UniqueId id = runtime->unique_id();
        return py::bytes(id.bytes, sizeof id.bytes);
      },
      "What the ranks of a new group have to know; made by one of them.");
  m.def(
      "connect",
      [runtime](const py::bytes& id, int rank, int size, int device) {
        const UniqueId made = id_from(id);
        const py::gil_scoped_release release;
        const Birth birth =
            runtime->join(made, rank, size, device, std::make_shared<Work>("connect", "nccl", "", std::int64_t{0}));
        birth.work->wait(std::nullopt, raise_signals);
        return std::make_shared<Communicator>(std::move(*birth.backend), "nccl-world");
      },
      py::arg("id"), py::arg("rank"), py::arg("size"), py::arg("device"), "The group of all ranks that give this id.");
}
