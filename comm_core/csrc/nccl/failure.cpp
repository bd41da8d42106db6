#include "failure.hpp"

#include "comm_core/errors.hpp"

namespace comm_core {

std::exception_ptr attributed(const std::exception_ptr& cause, const std::string& who) {
  try {
    std::rethrow_exception(cause);
  } catch (const NcclError& e) {
    return std::make_exception_ptr(NcclError(who + ": " + e.what(), e.code()));
  } catch (const CudaError& e) {
    return std::make_exception_ptr(CudaError(who + ": " + e.what(), e.code()));
  } catch (const std::exception& e) {
    return std::make_exception_ptr(TransportError(who + ": " + e.what()));
  }
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
}

}  // namespace comm_core
