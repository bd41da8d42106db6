"""An event-by-event simulation of one computing thread and one wire. Pure.

    thread   computes, and waits for operations, as a program tells it
    wire     operations queue in lanes, a communicator each; the first ones of all lanes share the wire

Ranks are taken to be equal, so one of them is enough. Times are seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from overlap.plan.simulation.cores import Cores

__all__ = ["Compute", "Cost", "Operation", "Program", "Run", "Span", "Step", "Wire", "run", "shared"]

_NOTHING = 1e-12


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of an operation alone: `latency` passes whatever else is on the wire, `transfer` shares it.

    `processor`: the processor seconds of each rank that it takes.
    """

    latency: float
    transfer: float
    processor: float = 0.0

    @property
    def seconds(self) -> float:
        return self.latency + self.transfer

    def __add__(self, other: Cost) -> Cost:
        processor = self.processor + other.processor
        return Cost(self.latency + other.latency, self.transfer + other.transfer, processor)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted from `begun` to `ended`: of the thread, or of one of the wire's lanes."""

    row: str
    label: str
    begun: float
    ended: float


class Operation:
    """One collective; `then` is called when it is done. `most`: the share of the wire that it can use.

    `cores`: those of each rank that it keeps busy while it has the wire alone.
    """

    __slots__ = ("begun", "cores", "done", "label", "latency", "left", "most", "then")

    def __init__(self, label: str, cost: Cost, then: Callable[[], None] | None = None, most: float = 1.0) -> None:
        self.label, self.then, self.most, self.done = label, then, most, False
        self.begun = 0.0  # when it was the first of its lane
        self.latency, self.left = cost.latency, cost.transfer
        self.cores = cost.processor / cost.seconds if cost.seconds else 0.0


class Wire:
    """The wire: lanes in each of which operations follow one another. `spans` are of those that are over."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[Operation]] = {}
        self._now = 0.0
        self.spans: list[Span] = []

    def send(self, lane: str, operation: Operation) -> Operation:
        self._lanes.setdefault(lane, deque()).append(operation)
        operation.begun = self._now
        return operation

    @property
    def busy(self) -> bool:
        return any(self._lanes.values())

    @property
    def cores(self) -> float:
        """The cores of each rank that what is on the wire keeps busy now."""
        starting, moving = self._first()
        return sum(one.cores for one in starting) + sum(one.cores * share for one, share in moving)

    def _first(self) -> tuple[list[Operation], list[tuple[Operation, float]]]:
        """The first operations of all lanes: those that are starting, and those that move bytes with their shares."""
        first = [lane[0] for lane in self._lanes.values() if lane]
        flowing = [operation for operation in first if operation.latency <= _NOTHING]
        shares = shared([operation.most for operation in flowing]) if flowing else []
        return [one for one in first if one.latency > _NOTHING], list(zip(flowing, shares, strict=True))

    def advance(self, most: float) -> float:
        """Let at most `most` seconds pass, or as many as pass before something changes; returns how many did."""
        starting, moving = self._first()
        if not starting and not moving:
            self._now += most
            return most
        seconds = min(most, *(operation.latency for operation in starting), *(op.left / share for op, share in moving))
        for operation in starting:
            operation.latency -= seconds
        for operation, share in moving:
            operation.left -= seconds * share
        self._now += seconds
        ended = []
        for name, lane in self._lanes.items():
            if lane and lane[0].latency <= _NOTHING and lane[0].left <= _NOTHING:
                ended.append(lane.popleft())
                self.spans.append(Span(name, ended[-1].label, ended[-1].begun, self._now))
                if lane:
                    lane[0].begun = self._now
        for operation in ended:
            operation.done = True
            if operation.then is not None:
                operation.then()
        return seconds


def shared(most: Sequence[float]) -> list[float]:
    """Each operation's share of the wire, at most its `most`: equal shares, with leftovers divided among the others."""
    if len(most) == 1:
        return [min(1.0, most[0])]
    found, free = [0.0] * len(most), 1.0
    for number, place in enumerate(sorted(range(len(most)), key=most.__getitem__)):
        found[place] = min(most[place], free / (len(most) - number))
        free -= found[place]
    return found


@dataclass(frozen=True, slots=True)
class Compute:
    """The thread computes for so many seconds, if nothing disturbs it."""

    seconds: float
    kind: str = "compute"


@dataclass(frozen=True, slots=True)
class Step:
    """The thread begins a step."""


#: What the thread does next: compute, wait for an operation, or begin another step.
Program = Generator["Compute | Operation | Step", None, None]


@dataclass(slots=True)
class Run:
    """The outcome of a simulation, from its second half: seconds of each step, and seconds waited, by label.

    `spans`: what lasted in the last two steps, in seconds since they began.
    """

    step: float
    waits: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    @property
    def waited(self) -> float:
        return sum(self.waits.values())


def run(program: Program, wire: Wire, cores: Cores | None = None) -> Run:
    """Run `program` to its end. It begins a step more than it runs.

    `cores`: those that compute and also move the bytes. None: computation takes none, as on a GPU.
    """
    now = 0.0
    begun: list[float] = []
    spans: list[Span] = []
    waits: list[dict[str, float]] = []
    for what in program:
        if isinstance(what, Step):
            begun.append(now)
            waits.append({})
        elif isinstance(what, Operation):
            since = now
            while not what.done:
                now += wire.advance(float("inf"))
            if now > since:
                spans.append(Span("thread", f"wait {what.label}", since, now))
                waits[-1][what.label] = waits[-1].get(what.label, 0.0) + now - since
        else:
            left, since = what.seconds, now
            while left > _NOTHING:
                pace = 1.0 if cores is None else cores.stretched(wire.cores)
                passed = wire.advance(left * pace)
                now, left = now + passed, left - passed / pace
            spans.append(Span("thread", what.kind, since, now))
    half = len(begun) // 2
    number = len(begun) - 1 - half
    found: dict[str, float] = {}
    for step in waits[half:-1]:
        for label, seconds in step.items():
            found[label] = found.get(label, 0.0) + seconds / number
    first = begun[-min(2, len(begun))]
    last = [
        Span(one.row, one.label, one.begun - first, one.ended - first)
        for one in (*spans, *wire.spans)
        if one.ended > max(first, one.begun)
    ]
    return Run((begun[-1] - begun[half]) / number, found, last)
