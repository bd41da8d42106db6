"""The communication of a round, on a thread of its own: from the reductions over the outer step to the gathers.

Before anything travels, ranks meet in one small all-reduce: each learns whether all mean the same, and how the others take
part (`co2.join`). Where some have joined, the first rank that trains tells them about the event.

A round on its way: a thread that sees it through while the main thread makes local steps.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from co2.equations import OuterRule
from co2.pace import Pace
from co2.part import Contributors, Part
from co2.schedule import Event
from overlap.transport.communicator import Communicator, ReduceOp, Work
from overlap.transport.objects import allgather_object, broadcast_object, compare
from overlap.transport.operation import all_reduce, barrier

__all__ = ["GRADIENTS_WAIT", "Met", "RoundCommunication", "RoundThread", "Told", "agree_on_events"]

_NO_DIGEST = -(2**62)  # less than any, of either sign


class _Presence(IntEnum):
    """How a rank takes part in an event."""

    TRAINS = 0
    JOINED = 1  # what it had learned before it was out of data is in it
    OUT = 2  # it contributes nothing


class Met(NamedTuple):
    """What all ranks have said of an event before its data travel."""

    when: float  # all had come, by this rank's clock
    presence: tuple[int, ...]  # by rank

    @property
    def over(self) -> bool:
        """Whether all ranks have joined, so that there is no event."""
        return min(self.presence) > _Presence.TRAINS

    @property
    def teller(self) -> int | None:
        """The first rank that trains, where some ranks have joined and not all."""
        return self.presence.index(_Presence.TRAINS) if any(self.presence) and not self.over else None

    @property
    def among(self) -> Contributors:
        out = (rank for rank, presence in enumerate(self.presence) if presence == _Presence.OUT)
        return Contributors(len(self.presence), frozenset(out))


class Told(NamedTuple):
    """What a rank that has joined needs to be told of an event."""

    event: Event
    steps: int  # so far
    idle: frozenset[int]  # slots that do not travel
    batches: tuple[tuple[int, ...], ...]  # of slots that were taken in together
    trainable: frozenset[int]
    hyper_parameters: list[dict[str, Any]]
    rates: dict[int, float]  # mean inner learning rates of the round by slot, where the rule needs them


class RoundCommunication:
    """Carries the parts of one optimizer through their rounds, one round at a time.

    `changed` is held where others may look at a part.

    `arrived` is called, with `changed` held, once every rank has sent its part of a round, and before any rank can see it
    done.
    """

    def __init__(
        self,
        comm: Communicator,
        rule: OuterRule,
        changed: threading.Lock,
        arrived: Callable[[], None],
        waits: Callable[[], bool],
    ) -> None:
        """`waits`: whether this rank knows of one that waits to come in."""
        self._comm, self._rule, self._changed, self._arrived, self._waits = comm, rule, changed, arrived, waits
        self.somebody_waits = False  # as all ranks have agreed in the last event
        self.longest = 0.0  # step of an average so far, where the rule measures it
        self.pace = Pace()

    @torch.no_grad()
    def carry(
        self, parts: Sequence[Part], sent: Sequence[Part], idle: Collection[int], meet: Callable[[], Met]
    ) -> None:
        """Carry out a round of `parts`: those in `sent` travel, and this rank's shards make their outer step.

        Raises what `meet()` does, before anything travels.
        """
        met = meet()
        for part in sent:
            part.among = met.among
        _finish([part.reduce(self._comm) for part in sent])
        for part in sent:
            part.reduced()
        moved = self._moved(sent, idle) if self._rule.measures_gap and sent else 0.0
        with self._changed:
            self._arrived()
            self.longest = max(self.longest, moved)
            gap = self._rule.gap(moved, self.longest)
            for part in parts:
                if part in sent:
                    part.settle(gap, idle)
                else:
                    part.rest()
        issued = [part.gather(self._comm) for part in sent]
        for part, work in zip(sent, issued, strict=True):
            work.wait()
            part.received()
        if sent:
            self.pace.exchanged(time.perf_counter() - met.when, parts[0].slots[0].index)
        else:
            # So that here, too, who is done knows that all parts have come as far.
            self._comm.run(barrier(label="co2 round"))

    @torch.no_grad()
    def carry_average(
        self,
        sent: Sequence[Part],
        meet: Callable[[], Met],
        shards: dict[Part, torch.Tensor],
        outcome: Callable[[Part], torch.Tensor],
    ) -> None:
        """Carry out an average that is waited for.

        What this rank's shards become, the `outcome`, is left in `shards`. Raises as :meth:`carry`.
        """
        met = meet()
        for part in sent:
            part.among = met.among
        _finish([part.reduce_whole(self._comm) for part in sent])
        for part in sent:
            part.reduced_whole()
        with self._changed:
            self._arrived()
            shards.update((part, outcome(part)) for part in sent)
        for part in sent:
            part.whole[part.own] = shards[part]
        _finish([part.gather_whole(self._comm) for part in sent])

    # - Before anything travels. Where nothing does, ranks meet all the same: none is further than one round ahead

    def meet(self, trained: Sequence[str], told: Told) -> Met:
        """Meet the other ranks before an event, on a rank that trains. `told` is for those that have joined.

        Raises ``ValueError`` on every rank that contributes, and on those that do not, where names in `trained` differ.
        """
        met = self._meet(_Presence.TRAINS, trained)
        self._tell(met, told)
        return met

    def meet_joined(self, trained: Sequence[str] | None) -> tuple[Met, Told | None]:
        """Meet the other ranks before an event, on a rank that has joined; it contributes nothing if `trained` is None.

        Nothing is told if all have joined.

        Raises as :meth:`meet`.
        """
        met = self._meet(_Presence.OUT if trained is None else _Presence.JOINED, trained)
        return met, self._tell(met, None)

    def _meet(self, presence: _Presence, trained: Sequence[str] | None) -> Met:
        rank, size = self._comm.rank, self._comm.size
        digest = 0 if trained is None else zlib.crc32("\n".join(trained).encode())
        ends = [_NO_DIGEST, _NO_DIGEST] if trained is None else [digest, -digest]
        mine = [int(presence) if other == rank else 0 for other in range(size)]
        said = torch.tensor([*ends, self._waits(), *mine], dtype=torch.int64, device="cpu")
        self._comm.run(all_reduce(said, said, ReduceOp.MAX, label="co2 round"))
        most, least, heard, *everybodys = said.tolist()
        self.somebody_waits = bool(heard)
        met = Met(time.perf_counter(), tuple(everybodys))
        if most != -least and not met.over:
            found = allgather_object(self._comm, None if trained is None else list(trained))
            first = next(names for names in found if names is not None)
            compare("parameters trained in this round", [first if names is None else names for names in found])
        return met

    def _tell(self, met: Met, told: Told | None) -> Told | None:
        return told if met.teller is None else broadcast_object(self._comm, told, met.teller)

    def _moved(self, parts: Sequence[Part], idle: Collection[int]) -> float:
        """How far parameters that travel moved. What rests beside some of them makes no difference."""
        steps = {index: square for part in parts for index, square in part.squared_steps(idle).items()}
        total = sum(steps[index] for index in sorted(steps))
        squares = torch.tensor([total], dtype=torch.float64, device="cpu")
        self._comm.run(all_reduce(squares, squares, ReduceOp.SUM, label="co2 gap"))
        return float(squares.sqrt())


def _finish(issued: Sequence[Work | None]) -> None:
    for work in issued:
        if work is not None:
            work.wait()


#: In place of a number of events: this rank is between backward and ``step()``.
GRADIENTS_WAIT = -1


def agree_on_events(events: Sequence[int]) -> None:
    """Raise ``RuntimeError`` where ranks, each with its number of `events` so far, are in different rounds (pure)."""
    if GRADIENTS_WAIT in events:
        raise RuntimeError(
            "gradients wait for step(): call it, or zero_grad(), before average_parameters(); they do on rank "
            f"{list(events).index(GRADIENTS_WAIT)}"
        )
    if len(set(events)) > 1:
        other = next(rank for rank, count in enumerate(events) if count != events[0])
        raise RuntimeError(
            f"average_parameters() needs all ranks at the same round, and rank 0 has made {events[0]} and rank "
            f"{other} {events[other]}: every rank should make the same number of steps"
        )


class RoundThread:
    """Runs `work` at once, on a thread that ends with it. Who waits raises what it raises; :meth:`land` calls `landed`."""

    def __init__(self, work: Callable[[], None], landed: Callable[[], None] = lambda: None) -> None:
        self._work, self._landed = work, landed
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="dear-co2-round", daemon=True).start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until the thread is done."""
        self._done.wait()

    def end(self) -> None:
        """Wait until the thread is done, and raise what it raised."""
        self.wait()
        if self._error is not None:
            raise self._error

    def land(self) -> None:
        """Wait until the thread is done, then call `landed`."""
        self.end()
        self._landed()
