// From a validated operation to NCCL calls.
#pragma once

#include <cstddef>

#include "comm_core/operation.hpp"
#include "nccl_api.hpp"

namespace comm_core {

/// Throws Unsupported, saying what to do instead, for what NCCL cannot do.
void require_supported(const Operation& operation, int rank);

/// Puts the operation on `stream`. `scratch` is a byte of the device's memory for the barrier.
void enqueue(const NcclApi& nccl, NcclComm comm, const Operation& operation, int rank, int size, CudaStream stream,
             CudaAddress scratch);

}  // namespace comm_core
