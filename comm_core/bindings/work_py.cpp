#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "comm_core/work.hpp"
#include "memory.hpp"
#include "register.hpp"
#include "waiting.hpp"

namespace comm_core::bindings {
namespace {

std::atomic<unsigned long> main_thread{0};  // which also ends the interpreter

bool interpreter_is_gone() noexcept {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

}  // namespace

void lock_again(PyThreadState* state) {
  while (interpreter_is_gone() && PyThread_get_thread_ident() != main_thread) {
    std::this_thread::sleep_for(std::chrono::hours(1));
  }
  PyEval_RestoreThread(state);
}

void raise_signals() {
  if (PyThread_get_thread_ident() != main_thread) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void wait_for(const Work& work, std::optional<double> timeout) {
  std::optional<Work::Seconds> patience;
  if (timeout) patience = Work::Seconds(*timeout);
  unlocked([&] { work.wait(patience, raise_signals); });
  release_finished();
}

void register_work(py::module_& m) {
  main_thread = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  py::class_<Work, std::shared_ptr<Work>>(m, "Work", "One operation under way. Dropping it unfinished is allowed.")
      .def("wait", &wait_for, py::arg("timeout") = py::none(),
           "Block until done; raise the operation's error, or TimeoutError after `timeout` seconds. None and infinity "
           "wait for ever; a negative number or NaN is InvalidUsage.")
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
          [](const Work& w, std::uintptr_t stream) { unlocked([&] { w.order_before(stream, raise_signals); }); },
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
