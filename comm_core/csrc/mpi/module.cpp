// comm_core._mpi: importing it makes the MPI backend known; it starts nothing.
#include <pybind11/pybind11.h>

#include <memory>

#include "runtime.hpp"

PYBIND11_MODULE(_mpi, m) {
  m.doc() = "The MPI backend of comm_core. Importing it registers the backend and starts nothing.";
  comm_core::register_provider("mpi", std::make_unique<comm_core::MpiRuntime>());
}
