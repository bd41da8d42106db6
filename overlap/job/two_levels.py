"""Whether operations of all ranks go in two levels: within hosts, and once between hosts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from overlap.job.levels import Levels
from overlap.job.session import Session
from overlap.transport.communicator import Communicator
from overlap.transport.objects import agree
from overlap.transport.operation import all_gather, barrier, reduce_scatter

__all__ = ["between_hosts"]

_ELEMENTS = 2**20  # 4 MB, as large as buckets are
_REPEATS = 5
_GAIN = 0.95  # of two levels' time to one level's: less is not worth another order of sums


def between_hosts(session: Session) -> Levels | None:
    """The hosts, where operations of all ranks go in two levels; None: in one. On every rank; the same on all.

    Only where there are several hosts with as many ranks each. ``DEAR_TWO_LEVEL`` decides, and if that is "auto", which of
    both took less time for a reduce-scatter and an all-gather of 4 MB, the first time that somebody asks.
    """
    if session.levels is None:
        session.levels = (_decide(session),)
    return session.levels[0]


def _decide(session: Session) -> Levels | None:
    wish, groups = session.settings.two_level, session.hosts
    even = len({len(group) for group in groups}) == 1
    if wish == "0" or len(groups) == 1 or len(groups[0]) == 1 or not even:
        return None
    levels = Levels("two_level", groups)
    if wish == "1":
        return levels
    (flat,), (levelled,) = session.channels.lease(1), session.channels.lease(1, levels=levels)
    seconds = _measured([flat, levelled])
    return agree(session.control, levels if seconds[1] <= _GAIN * seconds[0] else None)


def _measured(comms: Sequence[Communicator]) -> list[float]:
    """Seconds of a reduce-scatter and an all-gather of each, in turn: medians by this rank's clock."""
    times: list[list[float]] = [[] for _ in comms]
    size = comms[0].size
    whole = torch.zeros(_ELEMENTS // size * size, dtype=torch.float32, device="cpu")
    shard = torch.zeros(_ELEMENTS // size, dtype=torch.float32, device="cpu")
    for repeat in range(1 + _REPEATS):
        for comm, mine in zip(comms, times, strict=True):
            comm.run(barrier(label="probe"))
            since = time.perf_counter()
            comm.run(reduce_scatter(whole, shard, label="probe"))
            comm.run(all_gather(shard, whole, label="probe"))
            if repeat:  # the first one makes connections
                mine.append(time.perf_counter() - since)
    return [statistics.median(mine) for mine in times]
