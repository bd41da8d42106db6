// One register function per public header.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <functional>

namespace comm_core {
class Work;
}

namespace comm_core::bindings {

namespace py = pybind11;

void register_errors(py::module_& m);
void register_types(py::module_& m);
void register_work(py::module_& m);
void register_communicator(py::module_& m);
void register_backend(py::module_& m);
void register_blockwise(py::module_& m);
void register_copies(py::module_& m);
void register_halves(py::module_& m);
void register_samples(py::module_& m);
void register_threads(py::module_& m);

/// The Python exception for an error of this library.
py::object to_python(const std::exception_ptr& error);

}  // namespace comm_core::bindings
