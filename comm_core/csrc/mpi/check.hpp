// MPI return codes become exceptions.
#pragma once

#include <mpi.h>

#include <string>

#include "comm_core/errors.hpp"

namespace comm_core {

inline std::string mpi_error_text(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return "unknown error";
  return std::string(text, static_cast<std::size_t>(length));
}

/// `doing` says what was tried; it is called only when needed.
template <class Doing>
void check(int code, const Doing& doing) {
  if (code == MPI_SUCCESS) return;
  throw MpiError(std::string(doing()) + ": " + mpi_error_text(code) + " (MPI code " + std::to_string(code) + ")", code);
}

inline void check(int code, const char* call) {
  check(code, [call] { return std::string(call); });
}

}  // namespace comm_core
