"""Pages of memory that several processes read, and of which one that writes gets its own, one by one (copy-on-write).

The kernel has one copy of what nobody has written to, whichever processes map it: of a file, or of memory without one.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
from typing import NamedTuple

import torch

from overlap.transport.communicator import Communicator
from overlap.transport.objects import allgather_object, broadcast_object

__all__ = ["HostPages", "host_pages", "in_pages", "storage_in"]

log = logging.getLogger("dear")

_MARK = "_dear_pages"


class HostPages(NamedTuple):
    """What the ranks of a host map: `pages`, and on the first of them `origin`, uint8, by which it writes what all read."""

    pages: mmap.mmap
    origin: torch.Tensor | None


def storage_in(pages: mmap.mmap, start: int, nbytes: int) -> torch.UntypedStorage:
    """A storage of its own over these bytes of `pages`. They stay mapped as long as some storage is over them."""
    storage = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=start).untyped_storage()
    setattr(storage, _MARK, True)
    return storage


def in_pages(tensor: torch.Tensor) -> bool:
    """Whether the memory of `tensor`, which is strided, is of :func:`storage_in`."""
    return hasattr(tensor.untyped_storage(), _MARK)


def host_pages(comm: Communicator, nbytes: int) -> HostPages | None:
    """Pages of zeros, on every rank of `comm`, which are on one host; None on all where they cannot have any together.

    The first rank writes to its `origin` alone; nothing but operations orders that and what others read. Pages take memory
    once they are written to, and are free once no rank has a storage over them. They have no name in the file system and
    need no room in ``/dev/shm``, of which containers have little.
    """
    if comm.size == 1 or not hasattr(os, "memfd_create"):
        return None
    handle, token = -1, f"dear-{secrets.token_hex(8)}"
    try:
        why = ""
        if comm.rank == 0:
            try:
                handle = os.memfd_create(token)
                os.ftruncate(handle, nbytes)
            except OSError as error:
                why = str(error)
        path, token, why = broadcast_object(comm, (f"/proc/{os.getpid()}/fd/{handle}", token, why), 0)
        pages = None
        if not why:
            pages, why = _mapped(path, token, nbytes)
        reasons = [each for each in allgather_object(comm, why) if each]
        if reasons or pages is None:
            if comm.rank == 0:
                log.info("ranks of this host cannot map memory of one another (%s): each keeps its own", reasons[0])
            return None
        origin = mmap.mmap(handle, nbytes) if comm.rank == 0 else None
    finally:
        if handle >= 0:
            os.close(handle)
    return HostPages(pages, None if origin is None else torch.frombuffer(origin, dtype=torch.uint8))


def _mapped(path: str, token: str, nbytes: int) -> tuple[mmap.mmap | None, str]:
    """A private map of the memory at `path`, or what is wrong: hosts of one name may be two, and have the path, too."""
    try:
        with open(path, "rb") as file:
            if token not in os.readlink(f"/proc/self/fd/{file.fileno()}"):
                return None, f"{path} is of another job"
            return mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY), ""
    except (OSError, ValueError) as error:
        return None, str(error)
