"""What a schedule can reach: its steps simulated on one computing thread and one wire. Pure.

    thread   forward, backward, and what it costs to hand a layer or a bucket over; waits as the strategy would
    wire     operations queue in lanes (a communicator each); the lanes' first ones share the wire evenly

Ranks are taken to be equal, so one of them is enough. Times are seconds; an operation's is what it takes alone. It is a
bound for an implementation as long as `start` and the thread's costs are: with all three zero, of the schedule itself.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import count

from overlap.features.early import next_count, spread

__all__ = ["Job", "bytescheduler", "dear", "equal_buckets"]

_STEPS = 24  # of which the second half is measured: early updates need some to settle
_NOTHING = 1e-12


@dataclass(frozen=True, slots=True)
class Job:
    """A model of equal layers. Forward takes a third of `compute`; `wire` is what all bytes take, both halves."""

    layers: int
    compute: float
    wire: float
    start: float = 0.0  # of each operation, on the wire
    per_layer: float = 0.0  # of the thread, to hand a gradient over
    per_bucket: float = 0.0  # of the thread, to issue, await and update a bucket

    @property
    def forward(self) -> float:
        return self.compute / 3 / self.layers

    @property
    def backward(self) -> float:
        return 2 * self.compute / 3 / self.layers


def equal_buckets(layers: int, size: int) -> list[int]:
    """Layers in each bucket, nearest the input first."""
    return [size] * (layers // size) + ([layers % size] if layers % size else [])


class _Operation:
    def __init__(self, seconds: float, then: Callable[[], None] | None = None) -> None:
        self.left, self.then, self.done = seconds, then, False


class _Wire:
    def __init__(self) -> None:
        self._lanes: dict[str, deque[_Operation]] = {}

    def send(self, lane: str, operation: _Operation) -> _Operation:
        self._lanes.setdefault(lane, deque()).append(operation)
        return operation

    @property
    def _first(self) -> list[_Operation]:
        return [lane[0] for lane in self._lanes.values() if lane]

    def pass_until_next(self, most: float) -> float:
        """Let at most `most` seconds pass, or as many as the next operation needs to end; returns how many did."""
        first = self._first
        if not first:
            return most
        seconds = min(most, min(operation.left for operation in first) * len(first))
        for operation in first:
            operation.left -= seconds / len(first)
        ended = [lane.popleft() for lane in self._lanes.values() if lane and lane[0].left <= _NOTHING]
        for operation in ended:
            operation.done = True
            if operation.then is not None:
                operation.then()
        return seconds


# What the thread does next: compute for so many seconds, wait for an operation, or (None) begin another step.
_Program = Generator[float | _Operation | None, None, None]


def _period(program: _Program, wire: _Wire) -> float:
    now, begun = 0.0, []
    for what in program:
        if what is None:
            begun.append(now)
        elif isinstance(what, _Operation):
            while not what.done:
                now += wire.pass_until_next(float("inf"))
        else:
            left = what
            while left > _NOTHING:
                passed = wire.pass_until_next(left)
                now, left = now + passed, left - passed
    half = len(begun) // 2
    return (begun[-1] - begun[half]) / (len(begun) - 1 - half)


def dear(job: Job, buckets: Sequence[int], *, eager: bool = False) -> float:
    """Seconds of a step of DeAR; `buckets` is how many layers each has, nearest the input first.

    `eager`: with early updates, by the rules of `overlap.features.early`.
    """
    wire = _Wire()
    return _period(_dear(job, buckets, wire, eager), wire)


def _dear(job: Job, buckets: Sequence[int], wire: _Wire, eager: bool) -> _Program:
    number = len(buckets)
    half = [job.start + job.wire / 2 * size / job.layers for size in buckets]  # a reduce-scatter, or an all-gather
    order = range(number - 1, -1, -1)  # of issue
    gathers: list[_Operation | None] = [None] * number
    planned, learned = number - 1 if eager else 0, False
    for _ in range(_STEPS + 1):
        yield None
        for bucket in range(number):
            gather = gathers[bucket]
            if gather is not None:
                yield gather
            yield job.forward * buckets[bucket]
        chosen = [order[place] for place in spread(number - 1, planned)]
        reductions: list[_Operation | None] = [None] * number
        gathers, done, spare = [None] * number, 0, False
        for place, bucket in enumerate(order):
            for _layer in range(buckets[bucket]):
                yield job.backward + job.per_layer
                before_last = reductions[order[place - 2]] if place > 1 else None
                if (
                    not eager
                    or bucket == 0
                    or not _over(before_last)
                    or (done and not _over(gathers[chosen[done - 1]]))
                ):
                    continue
                if done == planned:
                    spare = True
                    continue
                reduction = reductions[chosen[done]]
                if reduction is not None and reduction.done:
                    yield job.per_bucket / 2
                    gathers[chosen[done]] = wire.send("gathers", _Operation(half[chosen[done]]))
                    done += 1
            if bucket > 0:
                yield job.per_bucket / 2
                reductions[bucket] = wire.send("reductions", _Operation(half[bucket]))
        yield job.per_bucket / 2
        reductions[0] = wire.send("reductions", _Operation(half[0]))
        yield reductions[0]
        for bucket in [*chosen[done:], *range(number)]:
            if gathers[bucket] is None:
                reduction = reductions[bucket]
                assert reduction is not None, "all were issued"
                yield reduction
                yield job.per_bucket / 2
                gathers[bucket] = wire.send("gathers", _Operation(half[bucket]))
        planned = next_count(planned if learned else 0, done + spare, number - 1) if eager else 0
        learned = True


def bytescheduler(job: Job, *, partitions: int, credit: int) -> float:
    """Seconds of a step of ByteScheduler: a bucket for each layer, in `partitions`, `credit` of them under way."""
    wire = _Wire()
    return _period(_bytescheduler(job, wire, partitions, credit), wire)


def _bytescheduler(job: Job, wire: _Wire, partitions: int, credit: int) -> _Program:
    seconds = job.start + job.wire / job.layers / partitions
    waiting: list[tuple[int, int, int, _Operation]] = []  # by step, urgency, arrival
    left, arrivals = credit, count()

    def admit() -> None:
        nonlocal left
        while waiting and left > 0:
            left -= 1
            wire.send("all-reduces", heapq.heappop(waiting)[-1])

    def returned() -> None:
        nonlocal left
        left += 1
        admit()

    reductions: list[list[_Operation]] = [[] for _ in range(job.layers)]
    for step in range(_STEPS + 1):
        yield None
        for layer in range(job.layers):
            yield from reductions[layer]
            yield job.per_bucket / 2 + job.forward
        for layer in range(job.layers - 1, -1, -1):
            yield job.backward + job.per_layer + job.per_bucket / 2
            reductions[layer] = [_Operation(seconds, returned) for _ in range(partitions)]
            for operation in reductions[layer]:
                heapq.heappush(waiting, (step, layer, next(arrivals), operation))
            admit()


def _over(operation: _Operation | None) -> bool:
    return operation is None or operation.done


def main() -> None:
    """Print steps over max(compute, wire) of a hundred layers: the schedule alone."""
    methods = [f"{name} {size} MB" for name in ("dear", "early") for size in (1, 2, 4)]
    print("wire/compute  " + "  ".join(f"{name:>11}" for name in [*methods, "credit 4 MB", "credit 2 MB"]))
    for ratio in (0.33, 0.67, 1.0, 1.02, 1.33, 2.0):
        job = Job(100, compute=1.0, wire=ratio)
        steps = [dear(job, equal_buckets(100, size), eager=eager) for eager in (False, True) for size in (1, 2, 4)]
        steps += [bytescheduler(job, partitions=1, credit=credit) for credit in (4, 2)]
        print(f"{ratio:12.2f}  " + "  ".join(f"{step / max(1.0, ratio):11.3f}" for step in steps))


if __name__ == "__main__":
    main()
