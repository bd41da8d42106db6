// Everything this library throws. Nothing in it exits or terminates the process.
#pragma once

#include <stdexcept>
#include <string>

namespace [[gnu::visibility("default")]] comm_core {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller's arguments do not fit; nothing was sent.
class InvalidUsage : public Error {
 public:
  using Error::Error;
};

/// The request is meaningful but not available here (operator on a dtype, backend not built ...); nothing was sent.
class Unsupported : public Error {
 public:
  using Error::Error;
};

/// wait() gave up; the operation itself goes on.
class TimeoutError : public Error {
 public:
  using Error::Error;
};

/// Bytes did not arrive as agreed. The communicator is unusable afterwards.
class TransportError : public Error {
 public:
  using Error::Error;
};

/// An MPI call returned something else than MPI_SUCCESS.
class MpiError : public TransportError {
 public:
  MpiError(const std::string& what, int code) : TransportError(what), code_(code) {}
  int code() const noexcept { return code_; }

 private:
  int code_;
};

/// An NCCL call, or an operation of NCCL's under way, failed.
class NcclError : public TransportError {
 public:
  NcclError(const std::string& what, int code) : TransportError(what), code_(code) {}
  int code() const noexcept { return code_; }

 private:
  int code_;
};

/// A call of the CUDA driver failed, or a device did.
class CudaError : public TransportError {
 public:
  CudaError(const std::string& what, int code) : TransportError(what), code_(code) {}
  int code() const noexcept { return code_; }

 private:
  int code_;
};

}  // namespace comm_core
