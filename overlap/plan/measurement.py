"""Turns time stamps of some steps into what a simulation needs: layer times, thread costs, network speed. Pure.

    | begun … forward: layer after layer … left | backward: gradient after gradient | stepping … ended |

All stamps are seconds of one clock. A layer is what `Facts.units` has together: parameters of one module, in the order of
their use.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from overlap.plan.simulation.events import shared
from overlap.plan.simulation.network import Fitted
from overlap.plan.simulation.workload import Costs, Layer, Workload
from overlap.plan.spans import Spans
from overlap.transport.encoding import travels

__all__ = [
    "Lap",
    "Passing",
    "Sent",
    "Times",
    "bare_workload",
    "fitted",
    "layer_times",
    "services",
    "thread_costs",
    "without_passing",
    "workload",
]

_OPTIMIZER_CALL = 5e-5  # seconds of the user's step() on no elements, at least; the rest of an update is by the byte


@dataclass(frozen=True, slots=True)
class Sent:
    """An operation of a bucket: the lane it queues in, when it was issued and when it was over."""

    kind: str  # "reduce" or "gather"
    bucket: int
    nbytes: int  # of the bucket
    wire: int  # as they travel
    halves: int  # an all-reduce is two
    lane: int
    issued: float
    ended: float
    most: float = 1.0  # the share of the links that it can fill


@dataclass(slots=True)
class Lap:
    """The time stamps of one step on one rank."""

    begun: float = 0.0  # the step() before ended
    used: list[tuple[int, float]] = field(default_factory=list)  # slot, and when forward asked for it
    left: list[float] = field(default_factory=list)  # when outermost modules were left
    waits: list[tuple[float, float]] = field(default_factory=list)  # for parameters, from … to
    gates: list[tuple[float, float]] = field(default_factory=list)  # in which a gate ran, waits among it
    issues: list[tuple[float, float]] = field(default_factory=list)  # in which an operation was issued
    gradients: list[tuple[int, float, float]] = field(default_factory=list)  # slot, when it came, when it was handled
    stepping: float = 0.0  # step() was called …
    ended: float = 0.0  # … and ended


@travels
@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of the parts of one rank's step, medians over laps.

    Of layers in order: the model's own forward and backward, and what is ours in them: gates in forward, hooks on
    gradients in backward, which copy and may compress.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    gates: tuple[float, ...]
    hooks: tuple[float, ...]
    before: float  # from the end of step() to forward: a data loader's, say
    between: float  # from the end of forward to backward: the loss, other passes of an accumulated step
    after: float  # from the last gradient to step()
    update: float  # seconds per byte that this rank updates
    handling: float  # of a bucket, to issue its operations and to begin its update

    @property
    def computed(self) -> float:
        """The seconds that do not depend on communication, without updates."""
        return self.before + self.between + self.after + sum(self.forward) + sum(self.backward)


@dataclass(frozen=True, slots=True)
class Passing:
    """The seconds that torch spends around our code: for a module's call, a parameter that is read, a gradient's hook.

    No stamp inside can see it.
    """

    module: float = 0.0
    parameter: float = 0.0
    gradient: float = 0.0


@dataclass(slots=True)
class _Step:
    forward: list[float]
    backward: list[float]
    gates: list[float]
    hooks: list[float]
    before: float
    between: float
    after: float


class _Own:
    """What of a stretch of a lap is the script's own, and what is a gate's: waits are nobody's."""

    def __init__(self, lap: Lap) -> None:
        self._waits = Spans(lap.waits)
        self._others = Spans([*lap.waits, *lap.gates])
        self._not_hooks = Spans([*lap.waits, *lap.issues])

    def seconds(self, since: float, until: float) -> float:
        return max(0.0, until - since - self._others.covered(since, until))

    def gates(self, since: float, until: float) -> float:
        return self._others.covered(since, until) - self._waits.covered(since, until)

    def hook(self, came: float, handled: float) -> float:
        """Without operations that were issued in it: their cost is that of the bucket."""
        return max(0.0, handled - came - self._not_hooks.covered(came, handled))


def _times_of(lap: Lap, layer_of: Mapping[int, int], layers: int) -> _Step | None:
    """None for a step without a forward or a gradient, as on a rank that had no batch."""
    first_used: dict[int, float] = {}
    for slot, when in lap.used:
        layer = layer_of.get(slot)
        if layer is not None:
            first_used.setdefault(layer, when)
    final = {slot: (came, handled) for slot, came, handled in lap.gradients if slot in layer_of}
    if not first_used or not final:
        return None
    own, nothing = _Own(lap), [0.0] * layers
    found = _Step([*nothing], [*nothing], [*nothing], [*nothing], 0.0, 0.0, 0.0)
    order = sorted(first_used, key=first_used.__getitem__)
    arrivals = sorted((came, handled, slot) for slot, (came, handled) in final.items())
    first_gradient = arrivals[0][0]
    last = first_used[order[-1]]
    left = [when for when in lap.left if last <= when <= first_gradient]
    end = min(left, default=first_gradient)
    ends = [first_used[layer] for layer in order[1:]] + [end]
    for layer, until in zip(order, ends, strict=True):
        since = first_used[layer]
        found.forward[layer] = own.seconds(since, until)
        found.gates[layer] = own.gates(since, until)
    before_backward = max(left, default=end)
    found.before = own.seconds(lap.begun, first_used[order[0]])
    found.between = own.seconds(end, before_backward)
    now = before_backward
    for came, handled, slot in arrivals:
        found.backward[layer_of[slot]] += own.seconds(now, came)
        found.hooks[layer_of[slot]] += own.gates(now, came) + own.hook(came, handled)
        now = handled
    found.after = own.seconds(now, lap.stepping)
    return found


def layer_times(laps: Sequence[Lap], layer_of: Mapping[int, int], layers: int) -> Times | None:
    """The times of a step, medians over `laps`; `layer_of` has the layer of each slot.

    None where this rank had no batch.
    """
    steps = [step for step in (_times_of(lap, layer_of, layers) for lap in laps) if step is not None]
    if not steps:
        return None

    def middle(name: str) -> tuple[float, ...]:
        return tuple(statistics.median(values) for values in zip(*(getattr(step, name) for step in steps), strict=True))

    before, between, after = (
        statistics.median(getattr(step, name) for step in steps) for name in ("before", "between", "after")
    )
    return Times(
        middle("forward"), middle("backward"), middle("gates"), middle("hooks"), before, between, after, 0.0, 0.0
    )


def without_passing(times: Times, tensors: Sequence[int], passing: Passing) -> Times:
    """The `times` without what torch spends to call our gates and hooks, in layers of so many `tensors`.

    At most half of a layer's own: a probe may have been disturbed.
    """
    ways = [passing.module + passing.parameter * number for number in tensors]
    taken = [min(way, own / 2) for way, own in zip(ways, times.forward, strict=True)]
    back = [min(passing.gradient * number, own / 2) for number, own in zip(tensors, times.backward, strict=True)]
    return replace(
        times,
        forward=tuple(map(float.__sub__, times.forward, taken)),
        backward=tuple(map(float.__sub__, times.backward, back)),
        gates=tuple(map(float.__add__, times.gates, taken)),
        hooks=tuple(map(float.__add__, times.hooks, back)),
    )


def thread_costs(
    sent: Sequence[Sent], laps: Sequence[Lap], share: Mapping[int, int], handling: float, *, together: bool = False
) -> tuple[float, float]:
    """The seconds per updated byte and per bucket, from the gaps between the all-gathers that ``step()`` issued.

    Args:
        sent: operations of those laps, in order of issue.
        share: bytes of each bucket that this rank updates.
        handling: seconds of the thread to issue one operation and to take its end, as a probe has found it.
        together: several buckets are updated in one call, so that one gap has the updates of others, too.
    """
    gaps: list[tuple[int, float]] = []
    for lap in laps:
        reduced = {
            one.bucket: one.ended for one in sent if one.kind == "reduce" and lap.begun <= one.issued <= lap.ended
        }
        gathers = [one for one in sent if one.kind == "gather" and lap.stepping <= one.issued <= lap.ended]
        for before, one in pairwise(gathers):
            if share.get(one.bucket) and one.bucket in reduced:
                gap = one.issued - max(before.issued, reduced[one.bucket])
                if gap > 0:
                    gaps.append((share[one.bucket], gap))
    if not gaps:
        return 0.0, 2 * handling
    call = min(handling + _OPTIMIZER_CALL, min(gap for _, gap in gaps))
    if together:
        return sum(gap for _, gap in gaps) / sum(nbytes for nbytes, _ in gaps), 2 * handling
    per_byte = statistics.median((gap - call) / nbytes for nbytes, gap in gaps)
    return per_byte, 2 * call


def services(sent: Iterable[Sent], start: float) -> list[tuple[float, bool]]:
    """For each operation, the seconds its bytes need on idle links, and whether it waited for others in its lane.

    It could begin when it was issued and these were over. First come the seconds of its `start`, of each half. Then lanes
    share the links as in a simulation: an operation that could fill half of them, or that had another beside it, did half
    of its work in a second.
    """
    free: dict[tuple[str, int], float] = {}
    begun, queued, borders = list[float](), list[bool](), list[tuple[float, bool, int]]()
    sent = list(sent)
    for place, one in enumerate(sent):
        before = free.get((one.kind, one.lane), 0.0)
        begun.append(max(one.issued, before))
        queued.append(one.issued < before)
        free[one.kind, one.lane] = one.ended
        flows = begun[place] + start * one.halves
        if one.ended > flows:
            borders += [(flows, True, place), (one.ended, False, place)]
    seconds, now = [0.0] * len(sent), 0.0
    under_way: dict[int, float] = {}  # what each can fill
    for when, begins, place in sorted(borders):
        if when > now:
            for other, share in zip(under_way, shared(list(under_way.values())), strict=True):
                seconds[other] += (when - now) * share
            now = when
        if begins:
            under_way[place] = sent[place].most
        else:
            del under_way[place]
    return list(zip(seconds, queued, strict=True))


def fitted(
    workers: int, sent: Sequence[Sent], seconds: Sequence[float], queued: Sequence[bool], start: float
) -> Fitted:
    """The network, fitted to the bytes of operations and the `seconds` of each, the least of all ranks.

    `start`: of half an all-reduce, whatever its size, as a probe says.

    Who is late makes all others wait, so the least is what an operation took. Those that were `queued` count, if there are
    any: of others, buffers on the way take a part, and they are over before all their bytes have passed the network.
    Medians by the byte, over the larger half, whose start counts least.
    """
    known = [
        (one.wire * one.halves, took, waited)
        for one, took, waited in zip(sent, seconds, queued, strict=True)
        if one.wire and took < math.inf
    ]
    if not known:
        return Fitted(workers, start, 0.0, 0.0)
    if any(waited for *_, waited in known):
        known = [one for one in known if one[2]]
    middle = statistics.median(nbytes for nbytes, *_ in known)
    pace = statistics.median(took / nbytes for nbytes, took, _ in known if nbytes >= middle)
    shares: dict[str, float] = {}
    for kind in ("reduce", "gather"):
        mine = [one for one in sent if one.kind == kind and one.nbytes]
        shares[kind] = sum(one.wire for one in mine) / sum(one.nbytes for one in mine) if mine else 1.0
    return Fitted(workers, start, pace * shares["reduce"], pace * shares["gather"])


def workload(times: Times, sizes: Sequence[Sequence[int]], names: Sequence[str]) -> Workload:
    """The workload of a simulation: a layer for each of the model's, and two for what is done around forward.

    `sizes`: bytes of each layer's gradients. Gates and hooks count to their layers, as they stand in their way.
    """
    layers = bare_workload(times, sizes, names).layers
    around, (first, *own, last) = zip(times.gates, times.hooks, strict=True), layers
    full = (
        replace(layer, forward=layer.forward + gates, backward=layer.backward + hooks)
        for layer, (gates, hooks) in zip(own, around, strict=True)
    )
    return Workload((first, *full, last), Costs(0.0, times.handling, times.update))


def bare_workload(times: Times, sizes: Sequence[Sequence[int]], names: Sequence[str]) -> Workload:
    """The workload without our own costs: what the script computes in any case, the optimizer's update included."""
    own = (
        Layer(*each) for each in zip(names, times.forward, times.backward, (tuple(size) for size in sizes), strict=True)
    )
    first, last = (
        Layer("before forward", times.before, times.after, ()),
        Layer("between forward and backward", times.between, 0.0, ()),
    )
    return Workload((first, *own, last), Costs(0.0, 0.0, times.update))
