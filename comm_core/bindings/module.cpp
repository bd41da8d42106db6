// comm_core._C: everything but the backends that need a library of their own.
#include "register.hpp"

PYBIND11_MODULE(_C, m) {
  using namespace comm_core::bindings;
  m.doc() = "Collective operations on memory, by address.";
  register_errors(m);
  register_types(m);
  register_work(m);
  register_communicator(m);
  register_backend(m);
  register_blockwise(m);
  register_copies(m);
  register_halves(m);
  register_samples(m);
  register_threads(m);
}
