"""Whole parameters, each owned by one rank (ZeRO-1, OSS of FairScale), on DeAR's schedule. Pure.

A bucket's reduce-scatter and all-gather have shards of unequal size. They leave links idle in one direction, which the next
bucket's may use meanwhile: there are two lanes of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from overlap.plan.partition import lane_of
from overlap.plan.simulation.events import Compute, Operation, Program, Run, Step, Wire, run
from overlap.plan.simulation.network import Network
from overlap.plan.simulation.workload import Bucket, Workload

__all__ = ["owned", "shares_of"]

_STEPS = 8  # of which the second half is measured
_LANES = 2


def shares_of(work: Workload, buckets: Sequence[Bucket], owners: Sequence[int], ranks: int) -> list[list[int]]:
    """The bytes of each bucket that each of so many ranks owns; `owners` of all tensors, in the order of forward."""
    by_layer: list[list[int]] = []
    places = iter(owners)
    for layer in work.layers:
        held = [0] * ranks
        for nbytes in layer.tensors:
            held[next(places)] += nbytes
        by_layer.append(held)
    return [[sum(column) for column in zip(*by_layer[one.first : one.last + 1], strict=True)] for one in buckets]


def owned(work: Workload, network: Network, buckets: Sequence[Bucket], shares: Sequence[Sequence[int]]) -> Run:
    """`buckets`: nearest the input first. `shares`: see :func:`shares_of`. The rank that owns most updates last."""
    wire = Wire()
    return run(_owned(work, network, buckets, shares, wire), wire, contention=work.contention)


def _owned(
    work: Workload, network: Network, buckets: Sequence[Bucket], shares: Sequence[Sequence[int]], wire: Wire
) -> Program:
    costs, halves = work.costs, [network.half(bucket.nbytes) for bucket in buckets]
    filled, lanes = [network.filled(share) for share in shares], [lane_of(share, _LANES) for share in shares]
    updates = [Compute(costs.per_bucket / 2 + costs.update * max(share)) for share in shares]
    starting = {bucket.first: place for place, bucket in enumerate(buckets)}
    reductions: dict[int, Operation] = {}
    gathers: dict[int, Operation] = {}

    def send(kind: str, place: int) -> Operation:
        operation = Operation(f"{kind} {place}", halves[place], most=filled[place])
        return wire.send(f"{kind} in lane {lanes[place]}", operation)

    for _ in range(_STEPS + 1):
        yield Step()
        for index, layer in enumerate(work.layers):
            if starting.get(index) in gathers:
                yield gathers[starting[index]]
            yield Compute(layer.forward)
        for index in range(len(work.layers) - 1, -1, -1):
            layer = work.layers[index]
            yield Compute(layer.backward + costs.per_tensor * len(layer.tensors))
            if index in starting:
                yield Compute(costs.per_bucket / 2)
                reductions[starting[index]] = send("reduce-scatter", starting[index])
        for place in range(len(buckets)):
            yield reductions[place]
            yield updates[place]
            gathers[place] = send("all-gather", place)
