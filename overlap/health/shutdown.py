"""Closes a session's communicators, where some ranks may have issued operations that others never will."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Collection, Mapping, Sequence

from overlap.health.limit import Limit
from overlap.transport.communicator import UNCOUNTED, Communicator
from overlap.transport.objects import allgather_object

__all__ = ["close_all", "find_uneven", "last_limit", "report", "uneven"]

log = logging.getLogger("dear")

_SHOWN = 3


def uneven(issued: Sequence[Mapping[str, int]]) -> frozenset[str]:
    """The names of communicators on which some rank has issued more than another."""
    names = {name for mine in issued for name in mine}
    return frozenset(name for name in names if len({mine[name] for mine in issued if name in mine}) > 1)


def find_uneven(control: Communicator, communicators: Sequence[Communicator]) -> frozenset[str]:
    """The communicators on which ranks have issued different numbers of operations, when no script uses them any more.

    On every rank of `control`.

    A rank that ran a backward pass whose step() never came, because it had one batch more or caught an exception, would
    wait for ever for the others' part of the reductions.
    """
    committed = {communicator.name: communicator.committed for communicator in communicators if communicator.size > 1}
    return uneven(allgather_object(control, committed))


def report(rank: int, communicators: Sequence[Communicator], given_up: Collection[str]) -> None:
    """Warn of this rank's unfinished operations on communicators that are `given_up`, before any rank gives one up."""
    stranded = [communicator for communicator in communicators if communicator.name in given_up]
    pending = [work for communicator in stranded for work in communicator.pending() if work.op not in UNCOUNTED]
    lost = [f"{work.op} {work.label!r}" for work in pending]
    if lost:
        shown = ", ".join(lost[:_SHOWN]) + (", …" if len(lost) > _SHOWN else "")
        log.warning(
            "rank %d: at shutdown, %d operation(s) are given up that other ranks never issued: %s. Did this rank run a "
            "backward pass that others did not?",
            rank,
            len(lost),
            shown,
        )


def last_limit(comm: Communicator, warn_after: float, abort_after: float) -> Limit:
    """The time limit of a session's end, when ranks close connections and wait for all in ``MPI_Finalize``."""

    def what() -> str:
        return (
            f"rank {comm.rank} of {comm.size} ({socket.gethostname()}, pid {os.getpid()}) closes its connections, as all "
            "ranks do, and waits for one that has stopped in that"
        )

    return Limit(what, warn_after=warn_after, abort_after=abort_after if comm.size > 1 else 0.0, abort=comm.abort)


def close_all(communicators: Sequence[Communicator], given_up: Collection[str]) -> None:
    """Close `communicators`, in this order, on every rank of each; those `given_up` without waiting for anything."""
    for communicator in communicators:
        if communicator.name in given_up:
            communicator.abandon()
        communicator.close()
