#include <pybind11/pybind11.h>

#include "comm_core/errors.hpp"
#include "register.hpp"

namespace comm_core::bindings {
namespace {

/// The Python types, alive as long as the process.
struct ErrorTypes {
  PyObject *error, *invalid_usage, *unsupported, *timeout, *transport, *mpi, *nccl, *cuda;
};
ErrorTypes types{};

PyObject* new_type(py::module_& m, const char* name, const py::tuple& bases, const char* doc) {
  PyObject* const type =
      PyErr_NewExceptionWithDoc((std::string("comm_core.") + name).c_str(), doc, bases.ptr(), nullptr);
  if (type == nullptr) throw py::error_already_set();
  m.attr(name) = py::handle(type);
  return type;
}

py::object instance(PyObject* type, const std::exception& e) { return py::handle(type)(e.what()); }

template <class E>
py::object coded(PyObject* type, const E& e) {
  auto made = instance(type, e);
  made.attr("code") = e.code();
  return made;
}

}  // namespace

py::object to_python(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const MpiError& e) {
    return coded(types.mpi, e);
  } catch (const NcclError& e) {
    return coded(types.nccl, e);
  } catch (const CudaError& e) {
    return coded(types.cuda, e);
  } catch (const TransportError& e) {
    return instance(types.transport, e);
  } catch (const TimeoutError& e) {
    return instance(types.timeout, e);
  } catch (const Unsupported& e) {
    return instance(types.unsupported, e);
  } catch (const InvalidUsage& e) {
    return instance(types.invalid_usage, e);
  } catch (const std::exception& e) {
    return instance(types.error, e);
  }
}

void register_errors(py::module_& m) {
  const py::handle runtime_error = PyExc_RuntimeError;
  types.error = new_type(m, "Error", py::make_tuple(runtime_error), "The base of everything comm_core raises.");
  const py::handle error = types.error;
  types.invalid_usage = new_type(m, "InvalidUsage", py::make_tuple(error, py::handle(PyExc_ValueError)),
                                 "Arguments that do not fit. Nothing was sent.");
  types.unsupported = new_type(m, "Unsupported", py::make_tuple(error),
                               "A request that is meaningful but not available here. Nothing was sent.");
  types.timeout = new_type(m, "TimeoutError", py::make_tuple(error, py::handle(PyExc_TimeoutError)),
                           "wait() gave up; the operation itself goes on.");
  types.transport = new_type(m, "TransportError", py::make_tuple(error),
                             "Bytes did not arrive as agreed. The communicator is unusable afterwards.");
  types.mpi = new_type(m, "MpiError", py::make_tuple(py::handle(types.transport)),
                       "An MPI call failed; `code` is what it returned.");
  types.nccl = new_type(m, "NcclError", py::make_tuple(py::handle(types.transport)),
                        "An NCCL call or operation failed; `code` is its ncclResult_t.");
  types.cuda = new_type(m, "CudaError", py::make_tuple(py::handle(types.transport)),
                        "A CUDA call or device failed; `code` is the CUresult.");
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const Error&) {
      const auto made = to_python(std::current_exception());
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
    }
  });
}

}  // namespace comm_core::bindings
