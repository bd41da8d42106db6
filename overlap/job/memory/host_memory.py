"""Memory that the ranks of a host share."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from pathlib import Path

import torch

from overlap.job.session import Session
from overlap.transport.communicator import Communicator
from overlap.transport.objects import broadcast_object
from overlap.transport.operation import barrier

__all__ = ["HostMemory", "host_memory"]

_FOLDER = Path("/dev/shm")  # in memory, on Linux


class HostMemory:
    """Makes tensors whose memory all ranks of `comm` share, which are on one host."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    @property
    def room(self) -> int:
        """Bytes that tensors may still take on this host, all together."""
        found = os.statvfs(_FOLDER if _FOLDER.is_dir() else tempfile.gettempdir())
        return found.f_bavail * found.f_frsize

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor of zeros: what one rank writes, all read. On every rank of the host, in the same order.

        Nothing orders writes and reads of different ranks but operations among them. The memory is free once no rank has
        the tensor, or a view of it. Raises ``MemoryError`` on all of them where there is no room for it.
        """
        nbytes = max(numel * dtype.itemsize, 1)
        path, why = broadcast_object(self.comm, _file_of(nbytes) if self.comm.rank == 0 else ("", ""), 0)
        if why:
            raise MemoryError(f"{nbytes} bytes in {_FOLDER}, which the ranks of a host would share: {why}")
        with open(path, "r+b") as file:
            pages = mmap.mmap(file.fileno(), nbytes)
        self.comm.run(barrier(label="host memory"))
        if self.comm.rank == 0:
            Path(path).unlink()
        return torch.frombuffer(pages, dtype=dtype, count=max(numel, 1))[:numel]


def _file_of(nbytes: int) -> tuple[str, str]:
    """The path of a new file of that size in memory, or what is wrong."""
    handle, path = tempfile.mkstemp(prefix="dear-", dir=_FOLDER if _FOLDER.is_dir() else None)
    try:
        os.posix_fallocate(handle, 0, nbytes)  # an error now, and not a signal when it is written to
    except OSError as error:
        Path(path).unlink()
        return "", str(error)
    finally:
        os.close(handle)
    return path, ""


_memories: weakref.WeakKeyDictionary[Session, HostMemory] = weakref.WeakKeyDictionary()


def host_memory(session: Session) -> HostMemory:
    """That of this rank's host. On every rank of the job."""
    found = _memories.get(session)
    if found is None:
        found = _memories[session] = HostMemory(session.subset(session.cross_rank))
    return found
