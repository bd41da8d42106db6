"""The schedules of models whose whole parameters are freed after their use, to simulate. Pure.

What ours gather when is decided as in training, by `overlap.plan.sweeps`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from overlap.plan.simulation.events import Compute, Cost, Operation, Program, Run, Step, Wire, run
from overlap.plan.simulation.network import Medium
from overlap.plan.simulation.workload import Bucket, Workload
from overlap.plan.sweeps import Act, Do, Sweeps

__all__ = ["awaited", "sharded"]

_STEPS = 4  # of which the second half is measured


def sharded(
    work: Workload,
    network: Medium,
    buckets: Sequence[Bucket],
    *,
    room: int,
    stay: Collection[int] = (),
    keep: Collection[int] = (),
    passes: int = 1,
    again: Collection[tuple[int, int]] = (),
    apart: Mapping[int, Cost] | None = None,
    steps: int = _STEPS,
) -> Run:
    """ZeRO stage 3 (SC 2020), with buckets that `stay` from forward to backward, or are to `keep` until the step.

    `buckets`: nearest the input first; beside those, `room` bytes may be whole, and as many of gradients on their way. A
    step has so many `passes` forward and backward, after the last of which gradients are reduced. Backward computes the
    forward pass of some layers `again`, from the first to the last of each pair, when it comes to them. Those `apart` are
    gathered on a communicator of their own, at these costs.
    """
    wire = Wire()
    sweeps = Sweeps([bucket.nbytes for bucket in buckets], room, stay=stay, keep=keep)
    return run(
        _sharded(work, network, buckets, sweeps, room, passes, again, apart or {}, wire, steps),
        wire,
        work.cores,
    )


def _sharded(
    work: Workload,
    network: Medium,
    buckets: Sequence[Bucket],
    sweeps: Sweeps,
    room: int,
    passes: int,
    again: Collection[tuple[int, int]],
    apart: Mapping[int, Cost],
    wire: Wire,
    steps: int,
) -> Program:
    costs = work.costs
    gathers_cost = [apart.get(place, network.all_gather(bucket.nbytes)) for place, bucket in enumerate(buckets)]
    reductions_cost = [network.reduce_scatter(bucket.nbytes) for bucket in buckets]
    starting: dict[int, list[int]] = {}
    for place, bucket in enumerate(buckets):
        starting.setdefault(bucket.first, []).append(place)
    borders = [0, *sorted(index for index in starting if index), len(work.layers)]
    pieces = [
        (
            starting.get(first, []),
            Compute(sum(layer.forward for layer in work.layers[first:end]), "forward"),
            Compute(
                sum(layer.backward + costs.per_tensor * len(layer.tensors) for layer in work.layers[first:end]),
                "backward",
            ),
        )
        for first, end in pairwise(borders)
    ]
    recomputed: dict[int, list[tuple[list[int], Compute]]] = {}  # by the piece that backward comes to first
    for first, last in sorted(again, reverse=True):
        there = [number for number, (begin, end) in enumerate(pairwise(borders)) if begin <= last and first < end]
        seconds = sum(layer.forward for layer in work.layers[first : last + 1])
        places = [place for number in there for place in pieces[number][0]]
        recomputed.setdefault(there[-1], []).append((places, Compute(seconds, "recompute")))
    issue = Compute(costs.per_bucket / 2, "backward")
    updates = [
        Compute(costs.per_bucket / 2 + costs.update * bucket.nbytes / network.workers, "step") for bucket in buckets
    ]
    gathers: dict[int, Operation] = {}

    def carry_out(acts: Sequence[Do]) -> None:
        for act, place in acts:
            if act is Act.GATHER:
                lane = "lines" if place in apart else "gathers"
                gathers[place] = wire.send(lane, Operation(f"all-gather {place}", gathers_cost[place]))

    def used(places: Sequence[int]) -> Program:
        for place in places:
            carry_out(sweeps.use(place))
            yield gathers[place]

    for _ in range(steps + 1):
        yield Step()
        reductions: dict[int, Operation] = {}
        flying: deque[int] = deque()
        for number in range(passes):
            carry_out(sweeps.forward(trains=True))
            for places, forward, _ in pieces:
                yield from used(places)
                yield forward
                for place in places:
                    carry_out(sweeps.done(place))
            carry_out(sweeps.backward())
            for piece, (places, _, backward) in reversed(list(enumerate(pieces))):
                yield from used(places[::-1])
                for block, forward in recomputed.get(piece, ()):
                    yield from used(block[::-1])
                    yield forward
                yield backward
                for place in reversed(places):
                    carry_out(sweeps.done(place))
                    if number < passes - 1:
                        continue
                    yield issue
                    cost = reductions_cost[place]
                    reductions[place] = wire.send("reductions", Operation(f"reduce-scatter {place}", cost))
                    flying.append(place)
                    while len(flying) > 1 and sum(buckets[each].nbytes for each in flying) > room:
                        yield reductions[flying.popleft()]
            carry_out(sweeps.backward_over())
        for place in reversed(range(len(buckets))):
            yield reductions[place]
            yield updates[place]
        carry_out(sweeps.over())
        carry_out(sweeps.next_step())


def awaited(
    work: Workload, network: Medium, buckets: Sequence[Bucket], *, reshard: bool = True, steps: int = _STEPS
) -> Run:
    """FSDP2 where collectives block the thread, as gloo's do: each is awaited where it is issued, and nothing is hidden.

    `buckets`: its units, nearest the input first; whoever comes first has the layers before it, too. Unless `reshard`,
    whole parameters stay from forward to backward.
    """
    wire = Wire()
    return run(_awaited(work, network, buckets, reshard, wire, steps), wire, work.cores)


def _awaited(
    work: Workload, network: Medium, buckets: Sequence[Bucket], reshard: bool, wire: Wire, steps: int
) -> Program:
    costs = work.costs
    borders = [0, *(bucket.first for bucket in buckets[1:]), len(work.layers)]
    layers = [work.layers[first:end] for first, end in pairwise(borders)]
    issue = Compute(costs.per_bucket, "handling")

    def blocking(label: str, cost: Cost) -> Program:
        yield issue
        yield wire.send("collectives", Operation(label, cost))

    for _ in range(steps + 1):
        yield Step()
        for place, bucket in enumerate(buckets):
            yield from blocking(f"all-gather {place}", network.all_gather(bucket.nbytes))
            yield Compute(sum(layer.forward for layer in layers[place]), "forward")
        for place, bucket in reversed(list(enumerate(buckets))):
            if reshard:
                yield from blocking(f"all-gather {place}", network.all_gather(bucket.nbytes))
            handed_over = costs.per_tensor * bucket.tensors
            yield Compute(handed_over + sum(layer.backward for layer in layers[place]), "backward")
            yield from blocking(f"reduce-scatter {place}", network.reduce_scatter(bucket.nbytes))
        yield Compute(costs.update * work.nbytes / network.workers, "step")
