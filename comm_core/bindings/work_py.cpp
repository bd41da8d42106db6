#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "comm_core/work.hpp"
#include "memory.hpp"
#include "register.hpp"
#include "waiting.hpp"

namespace comm_core::bindings {

void raise_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void wait_for(const Work& work, std::optional<double> timeout) {
  std::optional<Work::Seconds> patience;
  if (timeout) patience = Work::Seconds(*timeout);
  {
    const py::gil_scoped_release release;
    work.wait(patience, raise_signals);
  }
  release_finished();
}

void register_work(py::module_& m) {
  py::class_<Work, std::shared_ptr<Work>>(m, "Work", "One operation under way. Dropping it unfinished is allowed.")
      .def("wait", &wait_for, py::arg("timeout") = py::none(),
           "Block until done; raise the operation's error, or TimeoutError after `timeout` seconds.")
      .def("done", &Work::done, "Whether wait() would return at once.")
      .def(
          "exception",
          [](const Work& w) -> py::object {
            const auto error = w.error();
            return error ? to_python(error) : py::none();
          },
          "The error of a failed operation; None while it runs and when it succeeded.")
      .def(
          "order_before",
          [](const Work& w, std::uintptr_t stream) {
            const py::gil_scoped_release release;
            w.order_before(stream, raise_signals);
          },
          py::arg("stream"), "Make later work on `stream` run after this operation. On the CPU the same as wait().")
      .def_property_readonly("op", &Work::op)
      .def_property_readonly(
          "label", [](const Work& w) { return w.label().empty() ? w.op() : w.label(); },
          "The caller's name for the operation; the kind of operation when none was given.")
      .def_property_readonly("nbytes", &Work::bytes)
      .def_property_readonly("seconds", &Work::seconds)
      .def("describe", &Work::describe)
      .def("__repr__", [](const Work& w) { return "<comm_core.Work " + w.describe() + ">"; });
}

}  // namespace comm_core::bindings
