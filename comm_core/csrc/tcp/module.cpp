// comm_core._tcp: importing it makes the TCP backend known; it starts nothing.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm_core/communicator.hpp"
#include "comm_core/errors.hpp"
#include "mesh.hpp"
#include "runtime.hpp"

namespace py = pybind11;

namespace {

using namespace comm_core;

void raise_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

Secret secret_from(const std::string& bytes) {
  Secret secret{};
  if (bytes.size() != secret.size()) {
    throw InvalidUsage("tcp: a secret has " + std::to_string(secret.size()) + " bytes, this one " +
                       std::to_string(bytes.size()));
  }
  std::memcpy(secret.data(), bytes.data(), secret.size());
  return secret;
}

std::optional<std::chrono::milliseconds> milliseconds(std::optional<double> seconds) {
  if (!seconds) return std::nullopt;
  constexpr double kShortest = 1, kLongest = 86'400;  // the kernel's integers hold no more than weeks
  return std::chrono::milliseconds(static_cast<std::int64_t>(1000 * std::clamp(*seconds, kShortest, kLongest)));
}

}  // namespace

PYBIND11_MODULE(_tcp, m) {
  m.doc() = "The TCP backend of comm_core. Importing it registers the backend and starts nothing.";
  auto* const runtime = new TcpRuntime;
  register_provider("tcp", std::unique_ptr<Provider>(runtime));
  py::class_<Socket>(m, "Listener", "A socket that other ranks connect to.")
      .def(py::init([](const std::string& host, int backlog) { return listen_on(host, backlog); }), py::arg("host"),
           py::arg("backlog"))
      .def_property_readonly("port", &port_of)
      .def("close", &Socket::close);
  m.def(
      "connect",
      [runtime](const std::vector<const Socket*>& listeners, int rank,
                const std::vector<std::vector<std::pair<std::string, int>>>& endpoints, int num_sockets, bool apart,
                const py::bytes& secret, double timeout, std::optional<double> silence) {
        const Secret shared = secret_from(secret);
        std::vector<std::vector<Endpoint>> all;
        for (const auto& of_rank : endpoints) {
          auto& made = all.emplace_back();
          for (const auto& [host, port] : of_rank) made.push_back({host, port});
        }
        const py::gil_scoped_release release;
        Mesh mesh = connect_mesh(listeners, rank, std::move(all), num_sockets, apart, shared,
                                 std::chrono::duration<double>(timeout), milliseconds(silence), raise_signals);
        const Birth birth =
            runtime->join(std::move(mesh), std::make_shared<Work>("connect", "tcp", "", std::int64_t{0}));
        birth.work->wait(std::nullopt, raise_signals);
        return std::make_shared<Communicator>(std::move(*birth.backend), "tcp-world");
      },
      py::arg("listeners"), py::arg("rank"), py::arg("endpoints"), py::arg("num_sockets"), py::arg("apart"),
      py::arg("secret"), py::arg("timeout"), py::arg("silence"),
      "The group of all ranks that give these endpoints and this secret.");
}
