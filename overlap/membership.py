"""Among which ranks an optimizer reduces: all of the job, or a process set."""

from __future__ import annotations

from dataclasses import dataclass

from overlap.communicator import Communicator
from overlap.horovod.process_set import ProcessSet, global_process_set
from overlap.session import Session

__all__ = ["Membership", "membership"]


@dataclass(frozen=True)
class Membership:
    """`comm` carries reductions, `gathers` all-gathers of sharded updates; `ranks` are its members' ranks in the job."""

    comm: Communicator
    gathers: Communicator
    ranks: tuple[int, ...]


def membership(session: Session, process_set: ProcessSet, *, sharding: bool) -> Membership:
    """The communicators for an optimizer over `process_set`. On every rank of the job, with its own set or the same.

    A rank outside of the set it gives trains alone. Raises ``ValueError`` for a set that is not registered.
    """
    number = process_set.process_set_id
    if process_set is global_process_set or number == 0:
        # All-gathers have a channel of their own: whoever waits for a reduction is not behind them.
        leased = session.channels.lease(2 if sharding else 1)
        return Membership(leased[0], leased[-1], tuple(range(session.comm.size)))
    if number is None:
        raise ValueError(f"{process_set} is not registered: pass it to init(process_sets=…) or to add_process_set()")
    mine = process_set.ranks if process_set.included() and process_set.ranks is not None else [session.comm.rank]
    color = number if process_set.included() else None
    comm = session.subset(color)
    return Membership(comm, session.subset(color) if sharding else comm, tuple(mine))
