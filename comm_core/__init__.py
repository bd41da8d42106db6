"""Moves bytes between ranks: reduce-scatter, all-gather and their relatives over TCP or MPI, or within one process.

Independent of torch: buffers enter by address, or through the buffer protocol. Importing this starts nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from comm_core.missing import explanation
from comm_core.version import __version__

try:
    from comm_core._C import (
        Buffer,
        Communicator,
        CudaError,
        DType,
        Error,
        InvalidUsage,
        MpiError,
        NcclError,
        Persistent,
        ReduceOp,
        TimeoutError,
        TransportError,
        Unsupported,
        Work,
        abort,
        blockwise_bytes,
        changed_sample,
        copy_past_caches,
        decode_blockwise,
        differ,
        encode_blockwise,
        local,
        modules_of_thread,
        take_samples,
    )
except ModuleNotFoundError as error:
    if error.name != "comm_core._C":
        raise
    here = Path(__file__).resolve().parent
    raise ImportError(explanation(here, f"{sys.version_info[0]}.{sys.version_info[1]}", sys.path)) from None

from comm_core.launch import build_info, finalize, mpi, mpi_available
from comm_core.nccl_connect import exchange_over, nccl
from comm_core.nccl_library import find_nccl
from comm_core.tcp_connect import tcp

__all__ = [
    "Buffer",
    "Communicator",
    "CudaError",
    "DType",
    "Error",
    "InvalidUsage",
    "MpiError",
    "NcclError",
    "Persistent",
    "ReduceOp",
    "TimeoutError",
    "TransportError",
    "Unsupported",
    "Work",
    "__version__",
    "abort",
    "blockwise_bytes",
    "build_info",
    "changed_sample",
    "copy_past_caches",
    "decode_blockwise",
    "differ",
    "encode_blockwise",
    "exchange_over",
    "finalize",
    "find_nccl",
    "local",
    "modules_of_thread",
    "mpi",
    "mpi_available",
    "nccl",
    "take_samples",
    "tcp",
]
