"""What runs beside the groups of a script that knows of torch alone: letters between its ranks, and the watchdog."""

from __future__ import annotations

import atexit
import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from overlap.health.launcher import agent_gone
from overlap.health.watchdog import Awaited, Watchdog
from overlap.job import settings
from overlap.transport.native import NativeCommunicator
from overlap.transport.objects import allgather_object
from overlap.transport.peer_queries import PeerQueries
from overlap.transport.work import Line

__all__ = ["Member", "Watch"]

_EXIT_SECONDS = 5.0  # for what is under way where a script ends without destroy_process_group()


class Member(Protocol):
    """A group of some of the ranks, or of all."""

    @property
    def comm(self) -> NativeCommunicator: ...
    @property
    def ranks(self) -> Sequence[int]:
        """By their numbers in the default group."""

    def hear_end(self, reason: str) -> None:
        """Another rank has ended the group."""

    def hear_of_message(self, sender: int, letter: Any) -> None:
        """A letter of another rank, by its number in the default group, about messages."""

    def close(self, seconds: float) -> None:
        """End the group, once what is under way is over, or after `seconds`."""


class Watch:
    """Of the default group, whose ranks are those of `comm`, and of the groups of some of them.

    Watches what is under way in all of them, with the limits of ``DEAR_STALL_WARN_SECONDS`` and
    ``DEAR_STALL_ABORT_SECONDS`` on rank 0. Carries letters between the ranks of a group. On every rank.
    """

    def __init__(self, comm: NativeCommunicator) -> None:
        wanted, host = settings.read(os.environ), socket.gethostname()
        control = self._control = comm.part(range(comm.size), "watch")
        self._default: Member | None = None
        self._groups: list[Member] = []
        self._queries = PeerQueries(control)
        limits = {"warn_after": wanted.stall_warn_seconds, "abort_after": wanted.stall_abort_seconds}
        self._watchdog = Watchdog(control, self._queries, host, **limits)
        self._watchdog.watch(self)
        said = allgather_object(control, (host, limits))
        self._watchdog.forsaken = agent_gone()
        self._watchdog.connected([each for each, _ in said], **said[0][1])
        atexit.register(self._end)

    def add(self, group: Member) -> None:
        """Watch `group`. The first is the default group."""
        self._default = self._default or group
        self._groups.append(group)
        self._queries.on(f"{_topic(group)}/ended", lambda _sender, reason: group.hear_end(reason))
        self._queries.on(f"{_topic(group)}/messages", group.hear_of_message)

    def leaving(self, group: Member) -> None:
        """`group` is about to end."""
        self._queries.off(_topic(group))
        if group is self._default:
            self._watchdog.leaving()

    def left(self, group: Member) -> None:
        """`group` has ended. Letters end with the default group."""
        self._groups.remove(group)
        if group is self._default:
            atexit.unregister(self._end)
            self._watchdog.close()
            self._queries.close()
            self._control.close()

    def tell_end(self, group: Member, reason: str) -> None:
        """Tell the other ranks of `group` why it has ended here."""
        mine = self._control.rank
        for rank in group.ranks:
            if rank != mine:
                self._queries.tell(rank, f"{_topic(group)}/ended", reason)

    def tell_of_message(self, group: Member, peer: int, letter: Any) -> None:
        """Tell rank `peer` of `group` about messages between the two."""
        self._queries.tell(group.ranks[peer], f"{_topic(group)}/messages", letter)

    def _end(self) -> None:
        """The script has ended, and let its groups be."""
        for group in reversed(list(self._groups)):
            group.close(_EXIT_SECONDS)

    # - What the watchdog asks

    def pending(self) -> Sequence[Awaited]:
        return list(itertools.chain.from_iterable(group.comm.pending() for group in list(self._groups)))

    def lines(self) -> Mapping[str, Line]:
        found: dict[str, Line] = {}
        for group in list(self._groups):
            found |= group.comm.lines()
        return found


def _topic(group: Member) -> str:
    return f"group/{group.comm.name}"
