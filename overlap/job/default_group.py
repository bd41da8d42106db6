"""Makes torch.distributed's default group for ranks that MPI started, so that other code finds it as under torchrun.

Libraries ask torch.distributed which ranks there are, and communicate over it: metrics, checkpoints, trainers. The group
is made over gloo, beside our own communicators. Ranks tell each other over those where to meet, and whether it worked on
all of them. Where it did not on one, all go on without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import default_pg_timeout

from overlap.job.meeting import Unreachable, meeting_address
from overlap.transport.communicator import Communicator
from overlap.transport.objects import NotSent, allgather_made, allgather_object, broadcast_made
from overlap.transport.torch.gloo import tear_down
from overlap.transport.torch.interfaces import VARIABLE, toward
from overlap.transport.torch.rendezvous import begin_group
from overlap.transport.torch.variables import Variables

__all__ = ["DefaultGroup", "Wish", "make", "open_store", "reach_store", "why_not"]

log = logging.getLogger("dear")

_SETUP = timedelta(seconds=60)  # for all ranks to connect; operations have torch's own limit afterwards


@dataclass(frozen=True, slots=True)
class Wish:
    """What a rank's script asks for, and what is there already."""

    wanted: bool
    there: bool  # the script has initialised torch.distributed
    gloo: bool  # this torch has it


def why_not(wishes: Sequence[Wish]) -> str | None:
    """The reason why ranks with these `wishes` make no group, "" if it needs no word; None if they make one (pure)."""
    for holds, says in (
        ([not wish.wanted for wish in wishes], "gave torch_distributed=False to init()"),
        ([wish.there for wish in wishes], "had initialised torch.distributed before init()"),
        ([not wish.gloo for wish in wishes], "have a torch without gloo"),
    ):
        if all(holds):
            return ""
        if any(holds):
            ranks = [str(rank) for rank, does in enumerate(holds) if does]
            return f"{len(ranks)} of {len(wishes)} ranks {says}, the first of them rank {ranks[0]}; all ranks have to do it"
    return None


class DefaultGroup:
    """The group that :func:`make` made, and the environment variables that point to it."""

    def __init__(self, variables: Variables) -> None:
        # torch alone keeps it: a script that destroys it gets rid of its threads, and of the port of rank 0's store.
        self._group = weakref.ref(dist.group.WORLD)
        self._variables = variables
        os.register_at_fork(after_in_child=functools.partial(_keep, self._group))

    def tear_down(self) -> None:
        """End operations under way with an error, here and on the peers."""
        group = self._group()
        if group is not None and dist.group.WORLD is group:
            tear_down(group._get_backend(torch.device("cpu")))

    def end(self) -> None:
        """Destroy the group and those that the script has made of its ranks, unless the script has done so.

        On every rank, when all have come to the end. Operations that are still under way, since the script never waited for
        them or other ranks never came to them, are given up: gloo would wait for them for half an hour.
        """
        group = self._group()
        if group is not None and dist.group.WORLD is group:
            tear_down(group._get_backend(torch.device("cpu")))
            dist.destroy_process_group()
        self._variables.restore()


def _keep(group: weakref.ref[dist.ProcessGroup | None]) -> None:
    """In a forked child, for as long as it lives: gloo's destructor waits for threads that are the parent's."""
    if (there := group()) is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(there))


def make(comm: Communicator, wanted: bool, local_rank: int, local_size: int) -> DefaultGroup | None:
    """Make torch.distributed's default group of the ranks of `comm`. On every rank of it.

    None where the scripts do not want it, or have one, and where some rank could not: rank 0 then warns, with the reason.
    """
    wish = Wish(wanted, dist.is_initialized(), dist.is_gloo_available())
    reason = why_not(allgather_object(comm, wish))
    if reason is None:
        try:
            return _make(comm, local_rank, local_size)
        except Unreachable as error:
            reason = str(error)
        except NotSent as error:
            reason = f"rank {error.sender} of {comm.size}: {error.reason}"
    if reason and comm.rank == 0:
        log.warning(
            "torch.distributed stays uninitialised, training goes on without it: %s. init(torch_distributed=False) does "
            "not try",
            reason,
        )
    return None


def _make(comm: Communicator, local_rank: int, local_size: int) -> DefaultGroup:
    """Each step on all ranks, or on none: :class:`NotSent` is raised on all where one has failed."""
    host = meeting_address(comm)
    stores: list[TCPStore] = []  # at most one
    port = broadcast_made(comm, lambda: open_store(host, stores))
    with contextlib.ExitStack() as undo:
        variables = Variables(
            {
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
                "RANK": str(comm.rank),
                "WORLD_SIZE": str(comm.size),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(local_size),
                **_interface(host),
            }
        )
        undo.callback(variables.restore)
        allgather_made(comm, lambda: reach_store(host, port, stores))
        undo.callback(_destroy)
        allgather_made(comm, lambda: _join(stores.pop(), comm))
        undo.pop_all()
    return DefaultGroup(variables)


def open_store(host: str, stores: list[TCPStore]) -> int:
    """Into `stores`; listens at that address alone, at the port that is returned."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=1024) as listener:
        port = int(listener.getsockname()[1])
        try:
            stores.append(_listening(host, port, listener))
        except NotImplementedError:  # torch 2.7, of a store over libuv
            stores.append(_listening(host, port, listener, use_libuv=False))
    return port


def _listening(host: str, port: int, listener: socket.socket, **more: bool) -> TCPStore:
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=_SETUP,
        wait_for_workers=False,
        master_listen_fd=os.dup(listener.fileno()),
        **more,
    )


def _interface(host: str) -> dict[str, str]:
    """The variable that names it to gloo, where the user has not: for the group, and for those that a script makes."""
    found = None if os.environ.get(VARIABLE) else toward(host)
    return {} if found is None else {VARIABLE: found.interface}


def reach_store(host: str, port: int, stores: list[TCPStore]) -> None:
    """To rank 0's store; an interface that does not exist is found out before others wait for this rank."""
    if not stores:
        stores.append(TCPStore(host, port, is_master=False, timeout=_SETUP, wait_for_workers=False))
    for interface in os.environ.get(VARIABLE, "").split(","):
        if interface:
            dist.ProcessGroupGloo.create_device(interface=interface)


def _join(store: TCPStore, comm: Communicator) -> None:
    begin_group(store, comm.rank, comm.size, _SETUP)
    store.set_timeout(default_pg_timeout)


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
