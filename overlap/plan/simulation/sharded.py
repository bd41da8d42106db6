"""The schedule of models whose whole parameters are freed after their use, to simulate. Pure.

What is gathered when is decided as in training, by `overlap.plan.sweeps`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from itertools import pairwise

from overlap.plan.simulation.events import Compute, Operation, Program, Run, Step, Wire, run
from overlap.plan.simulation.network import Medium
from overlap.plan.simulation.workload import Bucket, Workload
from overlap.plan.sweeps import Act, Do, Sweeps

__all__ = ["sharded"]

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
    steps: int = _STEPS,
) -> Run:
    """ZeRO stage 3 (SC 2020), with buckets that `stay` from forward to backward, or are to `keep` until the step.

    `buckets`: nearest the input first; beside those, `room` bytes may be whole, and as many of gradients on their way. A
    step has so many `passes` forward and backward, after the last of which gradients are reduced.
    """
    wire = Wire()
    sweeps = Sweeps([bucket.nbytes for bucket in buckets], room, stay=stay, keep=keep)
    return run(_sharded(work, network, buckets, sweeps, room, passes, wire, steps), wire, contention=work.contention)


def _sharded(
    work: Workload,
    network: Medium,
    buckets: Sequence[Bucket],
    sweeps: Sweeps,
    room: int,
    passes: int,
    wire: Wire,
    steps: int,
) -> Program:
    costs = work.costs
    gathers_cost = [network.all_gather(bucket.nbytes) for bucket in buckets]
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
    issue = Compute(costs.per_bucket / 2, "backward")
    updates = [
        Compute(costs.per_bucket / 2 + costs.update * bucket.nbytes / network.workers, "step") for bucket in buckets
    ]
    gathers: dict[int, Operation] = {}

    def carry_out(acts: Sequence[Do]) -> None:
        for act, place in acts:
            if act is Act.GATHER:
                gathers[place] = wire.send("gathers", Operation(f"all-gather {place}", gathers_cost[place]))

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
            for places, _, backward in reversed(pieces):
                yield from used(places[::-1])
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
