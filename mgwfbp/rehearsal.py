"""Measures backward times while training goes on, and replans the buckets from them."""

from __future__ import annotations

import weakref
from typing import Any, Protocol, cast

from mgwfbp.backward_times import BackwardClock, arrival_moments
from overlap.optimizer.distributed import DistributedOptimizer
from overlap.plan.strategy import Strategy
from overlap.transport.communicator import Communicator
from overlap.transport.objects import allgather_object
from overlap.transport.stamps import Stamp

__all__ = ["Rehearsal"]


class _Timed(Protocol):
    """What a strategy that goes by backward times offers; see :class:`mgwfbp.optimizer.MgWfbp`."""

    def measured(self, moments: dict[int, float], *, report: bool) -> Strategy: ...


class Rehearsal:
    """A study of an optimizer's first steps, called after each of them.

    The first one makes the buckets, the second one warms up, `steps` more are measured.

    Every rank counts the same steps, and the times of the first rank that has any decide. The hooks are gone afterwards.
    Steps of another optimizer do not count: the hook stays with the wrapped one, which may be wrapped again.
    """

    def __init__(self, comm: Communicator, steps: int) -> None:
        self._comm, self._steps = comm, steps
        self._done = 0
        self._clock: BackwardClock | None = None
        self._mine: weakref.ref[DistributedOptimizer] | None = None
        self._laps: list[dict[int, Stamp]] = []

    def attach(self, optimizer: DistributedOptimizer) -> None:
        """Start measuring with the next step of `optimizer`, which has made none yet."""
        self._mine = weakref.ref(optimizer)
        optimizer._study(self)

    @property
    def under_way(self) -> bool:
        return self._done == 0 or self._clock is not None

    def __call__(self, optimizer: DistributedOptimizer, _args: Any, _kwargs: Any) -> None:
        if self._mine is None or self._mine() is not optimizer:
            return
        self._done += 1
        if self._done == 1:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            self._clock = BackwardClock(params, optimizer._engine.round.comm.stamps())
        elif self._clock is not None:
            lap = self._clock.lap()
            if self._done > 2:
                self._laps.append(lap)
            if len(self._laps) == self._steps:
                self._clock.remove()
                laps, self._clock = self._clock.seconds(self._laps), None
                found = allgather_object(self._comm, arrival_moments(laps))
                moments = next((moments for moments in found if moments), {})  # rank 0 may have joined before
                strategy = cast(_Timed, optimizer.strategy)
                optimizer._replan(strategy.measured(moments, report=self._comm.rank == 0))
