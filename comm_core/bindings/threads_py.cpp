#include "register.hpp"

namespace comm_core::bindings {
namespace {

/// A collection runs anybody's finalizers, and so would let other threads go on in the middle of a look at them.
class NoCollection {
 public:
  NoCollection() : was_on_(PyGC_Disable() != 0) {}
  NoCollection(const NoCollection&) = delete;
  NoCollection& operator=(const NoCollection&) = delete;
  ~NoCollection() {
    if (was_on_) PyGC_Enable();
  }

 private:
  bool was_on_;
};

PyThreadState* find_thread(unsigned long ident) {
  auto* state = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
  while (state != nullptr && state->thread_id != ident) state = PyThreadState_Next(state);
  return state;
}

py::object module_of(const py::object& frame) {
  const auto globals = py::reinterpret_borrow<py::dict>(frame.attr("f_globals"));
  auto* const name = PyDict_GetItemString(globals.ptr(), "__name__");
  return name != nullptr && PyUnicode_Check(name) ? py::reinterpret_borrow<py::object>(name) : py::str("");
}

/// In Python the thread could go on between two frames, and what was seen of it would be kept alive: CPython 3.11
/// crashes now and then when somebody walks frames that return meanwhile.
py::list modules_of_thread(unsigned long ident) {
  const NoCollection quiet;
  py::list modules;
  auto* const state = find_thread(ident);
  if (state == nullptr) return modules;
  auto frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyThreadState_GetFrame(state)));
  while (frame) {
    modules.append(module_of(frame));
    auto* const back = PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(frame.ptr()));
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(back));
  }
  return modules;
}

}  // namespace

void register_threads(py::module_& m) {
  m.def("modules_of_thread", &modules_of_thread, py::arg("ident"),
        "The modules' names of the frames of a thread, innermost first; none where there is no such thread.");
}

}  // namespace comm_core::bindings
