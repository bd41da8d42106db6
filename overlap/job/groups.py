"""The ranks among which an optimizer reduces: all of the job, or a process set."""

from __future__ import annotations

from dataclasses import dataclass

from overlap.job.process_set import ProcessSet, global_process_set
from overlap.job.session import Session
from overlap.transport.communicator import Communicator

__all__ = ["Membership", "beside", "leader", "membership"]


@dataclass(frozen=True)
class Membership:
    """The communicators of an optimizer: for reductions, for all-gathers, and for what follows the script's calls.

    `everyone` connects all ranks whose parameters start alike: the members, by `calls`, or several such groups.
    """

    reductions: tuple[Communicator, ...]
    gathers: tuple[Communicator, ...]
    calls: Communicator
    ranks: tuple[int, ...]
    everyone: Communicator

    @property
    def comm(self) -> Communicator:
        """The communicator for everything else that members tell each other."""
        return self.reductions[0]


def membership(session: Session, process_set: ProcessSet, *, sharding: bool, lanes: int = 1) -> Membership:
    """The communicators for an optimizer over `process_set`. On every rank of the job, with its own set or the same.

    `lanes` of each kind. A rank outside of the set it gives trains alone. Raises ``ValueError`` for a set that is not
    registered.
    """
    number = process_set.process_set_id
    if process_set is global_process_set or number == 0:
        # All-gathers have a channel of their own: whoever waits for a reduction is not behind them.
        *data, calls = session.channels.lease((2 * lanes if sharding else 1) + 1)
        reductions, gathers = (data[:lanes], data[lanes:]) if sharding else (data, data)
        return Membership(tuple(reductions), tuple(gathers), calls, tuple(range(session.comm.size)), calls)
    if number is None:
        raise ValueError(f"{process_set} is not registered: pass it to init(process_sets=…) or to add_process_set()")
    mine = process_set.ranks if process_set.included() and process_set.ranks is not None else [session.comm.rank]
    color = number if process_set.included() else None
    calls = session.subset(color)
    if not sharding:
        one = (session.subset(color),)
        return Membership(one, one, calls, tuple(mine), calls)
    halves = [tuple(session.subset(color) for _ in range(lanes)) for _ in range(2)]
    return Membership(halves[0], halves[1], calls, tuple(mine), calls)


def beside(session: Session, process_set: ProcessSet) -> Communicator:
    """A communicator for what the members tell each other beside training, in an order of its own.

    On every rank of the job, as above.
    """
    if process_set is global_process_set or process_set.process_set_id == 0:
        return session.comm
    return session.subset(process_set.process_set_id if process_set.included() else None)


def leader(process_set: ProcessSet, rank: int) -> int:
    """The first of the members that `rank` of the job belongs to, which decides for them."""
    return process_set.ranks[0] if process_set.included() and process_set.ranks else rank
