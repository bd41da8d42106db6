"""A communicator over NCCL: ranks find each other through whatever already connects them."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from comm_core import _C
from comm_core.launch import watch_exit
from comm_core.nccl_library import find_nccl

__all__ = ["exchange_over", "nccl"]

#: Names the CUDA driver's library, where it is not simply ``libcuda.so.1``.
VARIABLE = "COMM_CORE_CUDA"

#: Gives every rank's bytes, in rank order, to every rank.
Exchange = Callable[[bytes], Sequence[bytes]]


def nccl(rank: int, size: int, device: int, exchange: Exchange) -> _C.Communicator:
    """A communicator over NCCL for memory of CUDA device `device`, with a stream of its own of the highest priority.

    Called on every rank. `exchange` is called once on each: over MPI it is ``exchange_over(comm_core.mpi())``, under
    torchrun anything that gathers bytes through torch.distributed. A communicator of one's own for each direction of
    traffic comes from `split()`.

    Raises, on every rank and with the number of the rank it happened to:
        Unsupported: libnccl, the CUDA driver or the device is missing, or ranks would use different versions of NCCL.
    """
    mine = _introduction(rank, device)
    everybody = [json.loads(message) for message in exchange(json.dumps(mine).encode())]
    if len(everybody) != size:
        raise _C.InvalidUsage(f"nccl: exchange() gave {len(everybody)} messages for {size} ranks")
    for other, said in enumerate(everybody):
        if said["trouble"] is not None:
            raise _C.Unsupported(f"NCCL cannot be used, because of rank {other}: {said['trouble']}")
    for other, said in enumerate(everybody):
        if said["version"] != everybody[0]["version"]:
            raise _C.Unsupported(
                f"ranks would use different versions of NCCL: rank 0 {_shown(everybody[0])}, rank {other} {_shown(said)}"
            )
    communicator = _backend().connect(bytes.fromhex(everybody[0]["id"]), rank, size, device)
    watch_exit(size)
    return communicator


def exchange_over(host: _C.Communicator) -> Exchange:
    """An exchange for :func:`nccl` over a communicator of the host's, such as ``comm_core.mpi()``."""

    def exchange(mine: bytes) -> list[bytes]:
        counts = host.all_gather_counts(len(mine))
        everything = bytearray(sum(counts))
        host.all_gather(mine, everything, counts=counts)
        ends = [sum(counts[: rank + 1]) for rank in range(host.size)]
        return [bytes(everything[end - count : end]) for count, end in zip(counts, ends, strict=True)]

    return exchange


def _introduction(rank: int, device: int) -> dict[str, Any]:
    try:
        library = find_nccl()
        backend = _backend()
        backend.load(library.path, os.environ.get(VARIABLE) or "libcuda.so.1")
        backend.require_device(device)
        made = backend.unique_id().hex() if rank == 0 else ""
    except _C.Error as error:
        return {"trouble": str(error), "version": "", "path": "", "id": ""}
    return {"trouble": None, "version": library.version_text, "path": library.path, "id": made}


def _shown(said: dict[str, Any]) -> str:
    return f"{said['version']} ({said['path']})"


def _backend() -> Any:
    return importlib.import_module("comm_core._nccl")
