"""What a round does between its two ends, on its own thread: from the reductions to the gathers.

A round on its way: a thread that sees it through while the main thread makes local steps.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Collection, Sequence

import torch

from co2.equations import OuterRule
from co2.pace import Pace
from co2.part import Part
from overlap.transport.communicator import Communicator, ReduceOp, Work
from overlap.transport.objects import allgather_object, compare

__all__ = ["RoundCommunication", "RoundThread", "agree_on_events"]


class RoundCommunication:
    """Sees the parts of one optimizer through, a round at a time. `changed` is held where others may look at a part.

    `met` is called, with `changed` held, once every rank has sent its part of a round, and before any rank can see it done.
    """

    def __init__(self, comm: Communicator, rule: OuterRule, changed: threading.Lock, met: Callable[[], None]) -> None:
        self._comm, self._rule, self._changed, self._met = comm, rule, changed, met
        self.longest = 0.0  # step of an average so far, where the rule measures it
        self.pace = Pace()

    @torch.no_grad()
    def carry(self, parts: Sequence[Part], sent: Sequence[Part], idle: Collection[int], trained: Sequence[str]) -> None:
        """A round of `parts`, of which those in `sent` travel: this rank's shards make their outer step.

        Raises ``RuntimeError`` on every rank, before anything travels, where the names in `trained` differ.
        """
        met = self._meet(trained)
        _finish([part.reduce(self._comm) for part in sent])
        moved = self._moved(sent, idle) if self._rule.measures_gap and sent else 0.0
        with self._changed:
            self._met()
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
            self.pace.exchanged(time.perf_counter() - met, parts[0].slots[0].index)
        else:
            self._meet(trained)  # so that here, too, whoever is done knows that all ranks' parts have come as far

    @torch.no_grad()
    def carry_average(
        self,
        sent: Sequence[Part],
        trained: Sequence[str],
        shards: dict[Part, torch.Tensor],
        outcome: Callable[[Part], torch.Tensor],
    ) -> None:
        """An average that is waited for. What this rank's shards become, the `outcome`, is left in `shards`. Raises as
        :meth:`carry`."""
        self._meet(trained)
        _finish([part.reduce_whole(self._comm) for part in sent])
        with self._changed:
            self._met()
            shards.update((part, outcome(part)) for part in sent)
        for part in sent:
            part.whole[part.own] = shards[part]
        _finish([part.gather_whole(self._comm) for part in sent])

    def _meet(self, trained: Sequence[str]) -> float:
        """When every rank had come."""
        # Where nothing travels, ranks meet all the same: none is further than one round ahead.
        digest = zlib.crc32("\n".join(trained).encode())
        ends = torch.tensor([digest, -digest], dtype=torch.int64, device="cpu")
        self._comm.all_reduce(ends, ends, ReduceOp.MAX, label="co2 round")
        if int(ends[0]) != -int(ends[1]):
            compare("parameters trained in this round", allgather_object(self._comm, list(trained)))
        return time.perf_counter()

    def _moved(self, parts: Sequence[Part], idle: Collection[int]) -> float:
        """How far parameters that travel moved. What rests beside some of them makes no difference."""
        steps = {index: square for part in parts for index, square in part.squared_steps(idle).items()}
        total = sum(steps[index] for index in sorted(steps))
        squares = torch.tensor([total], dtype=torch.float64, device="cpu")
        self._comm.all_reduce(squares, squares, ReduceOp.SUM, label="co2 gap")
        return float(squares.sqrt())


def _finish(issued: Sequence[Work | None]) -> None:
    for work in issued:
        if work is not None:
            work.wait()


def agree_on_events(control: Communicator, mine: int) -> None:
    """Raise ``RuntimeError`` on every rank where they have not come to the same round. On every rank of `control`."""
    events = allgather_object(control, mine)
    if len(set(events)) > 1:
        other = next(rank for rank, count in enumerate(events) if count != events[0])
        raise RuntimeError(
            f"average_parameters() needs all ranks at the same round, and rank 0 has made {events[0]} and rank "
            f"{other} {events[other]}: every rank should make the same number of steps"
        )


class RoundThread:
    """Runs `work` at once, on a thread that ends with it. Who waits raises what it raises; :meth:`land` calls `landed`.

    It carries event number `event`, of all averages and rounds.
    """

    def __init__(self, event: int, work: Callable[[], None], landed: Callable[[], None] = lambda: None) -> None:
        self.event, self._work, self._landed = event, work, landed
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

    def wait(self, seconds: float) -> bool:
        """Whether it is done, at the latest after so many seconds."""
        return self._done.wait(seconds)

    def end(self) -> None:
        """Wait until it is done."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def land(self) -> None:
        """Wait until it is done; what becomes of it."""
        self.end()
        self._landed()
