"""Brings the ranks together that mpirun has started, where torch finds no address to meet at."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import _rendezvous_handlers

import comm_core
from overlap.job.default_group import open_store, reach_store
from overlap.job.launch import Launcher, LaunchError, detect
from overlap.job.meeting import meeting_address
from overlap.transport.native import NativeCommunicator
from overlap.transport.objects import allgather_made, broadcast_made

__all__ = ["meet_over_mpi"]

Handler = Callable[..., Iterator[tuple[Any, int, int]]]


def meet_over_mpi() -> None:
    """``init_process_group()`` works under mpirun, as under torchrun.

    torch reads ``MASTER_ADDR`` from the environment and raises where it is not there. Ranks of MPI meet over MPI then.
    """
    handlers: dict[str, Handler] = _rendezvous_handlers
    before = handlers["env"]
    if getattr(before, "__module__", "") != __name__:
        handlers["env"] = _or_over_mpi(before)


def _or_over_mpi(before: Handler) -> Handler:
    def meet(url: str, timeout: timedelta = default_pg_timeout, **options: Any) -> Iterator[tuple[Any, int, int]]:
        if not _over_mpi_alone():
            yield from before(url, timeout=timeout, **options)
            return
        comm = NativeCommunicator(comm_core.mpi())
        stores: list[Any] = []
        host = meeting_address(comm)
        port = broadcast_made(comm, lambda: open_store(host, stores))
        allgather_made(comm, lambda: reach_store(host, port, stores))
        rank, size = comm.rank, comm.size
        comm.close()
        stores[0].set_timeout(timeout)
        yield stores[0], rank, size
        raise RuntimeError("ranks of an MPI job cannot meet once more")

    return meet


def _over_mpi_alone() -> bool:
    if os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        return False
    try:
        launch = detect(os.environ)
    except LaunchError:
        return False
    return launch.launcher is Launcher.MPI and launch.size > 1 and comm_core.mpi_available()
