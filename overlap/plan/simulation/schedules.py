"""The schedules to simulate, as programs of one rank's thread. Pure.

Each function returns what :func:`overlap.plan.simulation.events.run` saw of a steady state. Buckets come from
`overlap.plan.simulation.workload`; how a strategy chooses them is its own business.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from itertools import count, pairwise

from overlap.plan.early import next_count, spread
from overlap.plan.partition import lane_of
from overlap.plan.simulation.events import Compute, Cost, Operation, Program, Run, Step, Wire, run
from overlap.plan.simulation.network import Medium, filled
from overlap.plan.simulation.workload import Bucket, Workload

__all__ = ["all_reduced", "by_priority", "decoupled", "negotiated"]

_STEPS = 8  # of which the second half is measured …
_STEPS_EARLY = 24  # … as early updates need some to settle


def decoupled(
    work: Workload,
    network: Medium,
    buckets: Sequence[Bucket],
    *,
    whole: Collection[int] = (),
    early: bool = False,
    lanes: int = 1,
    steps: int = _STEPS,
) -> Run:
    """DeAR (2302.12445, section III): reduce-scatter under backward, update of shards, all-gather under the next forward.

    `buckets`: nearest the input first. Those at the places `whole` are all-reduced under backward, and updated in full by
    every rank. `early`: with early updates, by the rules of `overlap.features.early`; then none is whole, nor has shares.
    Unequal shares (ZeRO-1, OSS of FairScale) leave links idle in one direction, which another bucket may use meanwhile
    where there are several `lanes` (:func:`overlap.plan.partition.lane_of`). The rank that owns most updates last.
    """
    wire = Wire()
    if early:
        program = _early(work, network, buckets, wire)
    else:
        program = _decoupled(work, network, buckets, frozenset(whole), lanes, wire, steps)
    return run(program, wire, work.cores)


def _decoupled(
    work: Workload,
    network: Medium,
    buckets: Sequence[Bucket],
    whole: frozenset[int],
    lanes: int,
    wire: Wire,
    steps: int,
) -> Program:
    """What is computed between two events of the wire is one piece: a model has many more layers than it has buckets."""
    costs, places = work.costs, range(len(buckets))
    reductions_cost = [
        network.all_reduce(bucket.nbytes) if place in whole else network.reduce_scatter(bucket.nbytes)
        for place, bucket in enumerate(buckets)
    ]
    gathers_cost = [network.all_gather(bucket.nbytes) for bucket in buckets]
    most = [1.0 if bucket.shares is None else filled(bucket.shares) for bucket in buckets]
    lane = [0 if bucket.shares is None else lane_of(bucket.shares, lanes) for bucket in buckets]
    shares = [bucket.nbytes / network.workers if bucket.shares is None else max(bucket.shares) for bucket in buckets]
    updates = [Compute(costs.per_bucket / 2 + costs.update * share, "step") for share in shares]
    at_last = Compute(sum(costs.per_bucket / 2 + costs.update * buckets[place].nbytes for place in whole), "step")
    issue = Compute(costs.per_bucket / 2, "backward")
    starting: dict[int, list[int]] = {}
    for place, bucket in enumerate(buckets):
        starting.setdefault(bucket.first, []).append(place)
    borders = [0, *sorted(index for index in starting if index), len(work.layers)]
    pieces = [
        (
            starting.get(first, ()),
            Compute(sum(layer.forward for layer in work.layers[first:end]), "forward"),
            Compute(
                sum(layer.backward + costs.per_tensor * len(layer.tensors) for layer in work.layers[first:end]),
                "backward",
            ),
        )
        for first, end in pairwise(borders)
    ]
    gathers: dict[int, Operation] = {}

    def send(row: str, place: int) -> Operation:
        if place in whole:
            return wire.send(row, Operation(f"all-reduce {place}", reductions_cost[place]))
        half, cost = ("all-gather", gathers_cost) if row == "gathers" else ("reduce-scatter", reductions_cost)
        operation = Operation(f"{half} {place}", cost[place], most=most[place])
        return wire.send(f"{row}, lane {lane[place]}" if lane[place] else row, operation)

    for _ in range(steps + 1):
        yield Step()
        for waited, forward, _ in pieces:
            for place in waited:
                if place in gathers:
                    yield gathers[place]
            yield forward
        reductions: dict[int, Operation] = {}
        for ready, _, backward in reversed(pieces):
            yield backward
            for place in reversed(ready):
                yield issue
                reductions[place] = send("reductions", place)
        for place in places:
            yield reductions[place]
            if place not in whole:
                yield updates[place]
                gathers[place] = send("gathers", place)
        yield at_last


def _early(work: Workload, network: Medium, buckets: Sequence[Bucket], wire: Wire) -> Program:
    number, costs = len(buckets), work.costs
    starting = {bucket.first: place for place, bucket in enumerate(buckets)}
    ending = {bucket.last: place for place, bucket in enumerate(buckets)}
    order = range(number - 1, -1, -1)  # of issue
    gathers: list[Operation | None] = [None] * number
    planned, learned = number - 1, False

    def reduce(place: int) -> Operation:
        cost = network.reduce_scatter(buckets[place].nbytes)
        return wire.send("reductions", Operation(f"reduce-scatter {place}", cost))

    def gather(place: int) -> Operation:
        return wire.send("gathers", Operation(f"all-gather {place}", network.all_gather(buckets[place].nbytes)))

    updates = [Compute(costs.per_bucket / 2 + costs.update * bucket.nbytes / network.workers) for bucket in buckets]
    issue = Compute(costs.per_bucket / 2)
    for _ in range(_STEPS_EARLY + 1):
        yield Step()
        for index, layer in enumerate(work.layers):
            place = starting.get(index)
            under_way = None if place is None else gathers[place]
            if under_way is not None:
                yield under_way
            yield Compute(layer.forward)
        chosen = [order[place] for place in spread(number - 1, planned)]
        reductions: list[Operation | None] = [None] * number
        gathers, done, spare = [None] * number, 0, False
        current = number - 1
        for index in range(len(work.layers) - 1, -1, -1):
            layer = work.layers[index]
            yield Compute(layer.backward)
            current = ending.get(index, current)
            for _tensor in layer.tensors:
                yield Compute(costs.per_tensor)
                two_before = reductions[current + 2] if current + 2 < number else None
                room = current > 0 and _over(two_before)
                if not room or (done and not _over(gathers[chosen[done - 1]])):
                    continue
                if done == planned:
                    spare = True
                    continue
                reduction = reductions[chosen[done]]
                if reduction is not None and reduction.done:
                    yield updates[chosen[done]]
                    gathers[chosen[done]] = gather(chosen[done])
                    done += 1
            place = starting.get(index)
            if place is not None:
                yield issue
                reductions[place] = reduce(place)
        for place in [*chosen[done:], *range(number)]:
            if gathers[place] is None:
                reduction = reductions[place]
                assert reduction is not None, "all were issued"
                yield reduction
                yield updates[place]
                gathers[place] = gather(place)
        planned = next_count(planned if learned else 0, done + spare, number - 1)
        learned = True


def _over(operation: Operation | None) -> bool:
    return operation is None or operation.done


def all_reduced(work: Workload, network: Medium, buckets: Sequence[Bucket]) -> Run:
    """WFBP (Poseidon, 2017), MG-WFBP (1811.11141) and DDP (2006.15704): all-reduces under backward, all awaited after it.

    `buckets`: in the order in which they are complete.
    """
    wire = Wire()
    return run(_all_reduced(work, network, buckets, wire), wire, work.cores)


def _all_reduced(work: Workload, network: Medium, buckets: Sequence[Bucket], wire: Wire) -> Program:
    complete: dict[int, list[int]] = {}
    for place, bucket in enumerate(buckets):
        complete.setdefault(bucket.first, []).append(place)
    costs = work.costs
    for _ in range(_STEPS + 1):
        yield Step()
        yield Compute(sum(layer.forward for layer in work.layers))
        under_way: list[Operation] = []
        for index in range(len(work.layers) - 1, -1, -1):
            layer = work.layers[index]
            yield Compute(layer.backward + costs.per_tensor * len(layer.tensors))
            for place in complete.get(index, ()):
                yield Compute(costs.per_bucket / 2)
                cost = network.all_reduce(buckets[place].nbytes)
                under_way.append(wire.send("all-reduces", Operation(f"all-reduce {place}", cost)))
        for operation in under_way:
            yield operation
            yield Compute(costs.per_bucket / 2)
        yield Compute(costs.update * work.nbytes)


def negotiated(work: Workload, network: Medium, *, threshold: float, cycle: float, copy: float = 0.0) -> Run:
    """Horovod (1802.05799): a thread looks every `cycle` seconds which gradients all ranks have, and all-reduces these in
    buffers of at most `threshold` bytes, one after the other. All are awaited after backward.

    `copy`: seconds of a byte that is copied in memory. The same thread copies what shares a buffer into it and out of it,
    and the wire waits meanwhile.
    """
    wire = Wire()
    return run(_negotiated(work, network, threshold, cycle, copy, wire), wire, work.cores)


def _negotiated(work: Workload, network: Medium, threshold: float, cycle: float, copy: float, wire: Wire) -> Program:
    waiting: list[int] = []
    expected = 0  # gradients of this step that are not reduced yet
    drained = Operation("all-reduces", Cost(0.0, 0.0))
    negotiation = network.all_reduce(1).latency
    busy = False

    def begin(wait: float) -> None:
        nonlocal busy
        busy = bool(waiting)
        if not waiting:
            return
        taken = [waiting.pop(0)]
        while waiting and sum(taken) + waiting[0] <= threshold:
            taken.append(waiting.pop(0))
        copies = 2 * copy * sum(taken) if len(taken) > 1 else 0.0
        cost = network.all_reduce(sum(taken)) + Cost(negotiation + wait + copies, 0.0)

        def over() -> None:
            nonlocal expected
            expected -= len(taken)
            drained.done = expected == 0
            begin(0.0)

        wire.send("all-reduces", Operation("all-reduce", cost, over))

    for _ in range(_STEPS + 1):
        yield Step()
        yield Compute(sum(layer.forward for layer in work.layers))
        drained.done, expected = False, sum(len(layer.tensors) for layer in work.layers)
        for layer in reversed(work.layers):
            yield Compute(layer.backward + work.costs.per_tensor * len(layer.tensors))
            waiting += reversed(layer.tensors)
            if not busy:
                begin(cycle / 2)
        if expected:
            yield drained
        yield Compute(work.costs.per_bucket + work.costs.update * work.nbytes)


def by_priority(work: Workload, network: Medium, *, partition: float, credit: float, steps: int = _STEPS) -> Run:
    """ByteScheduler (SOSP 2019): layers in partitions of `partition` bytes, the most urgent first while fewer than `credit`
    bytes are under way; each layer is awaited, and updated, by the next forward.

    Rank 0 decides, and the others hear of it in a message. They wait for it where nothing else is under way meanwhile.
    """
    wire = Wire()
    return run(_by_priority(work, network, wire, partition, credit, steps), wire, work.cores)


def _by_priority(work: Workload, network: Medium, wire: Wire, partition: float, credit: float, steps: int) -> Program:
    waiting: list[tuple[int, int, int, int, Operation]] = []  # by step, urgency, arrival
    under_way, arrivals, costs = 0.0, count(), work.costs
    telling = network.reduce_scatter(1).latency

    def admit() -> None:
        nonlocal under_way
        while waiting and under_way < credit:
            *_, nbytes, operation = heapq.heappop(waiting)
            if not under_way:
                operation.latency += telling
            under_way += nbytes
            wire.send("all-reduces", operation)

    def returned(nbytes: int) -> None:
        nonlocal under_way
        under_way -= nbytes
        admit()

    reductions: list[list[Operation]] = [[] for _ in work.layers]
    for step in range(steps + 1):
        yield Step()
        for index, layer in enumerate(work.layers):
            yield from reductions[index]
            update = costs.per_bucket / 2 + costs.update * layer.nbytes if reductions[index] else 0.0
            yield Compute(update + layer.forward)
        for index in range(len(work.layers) - 1, -1, -1):
            layer = work.layers[index]
            yield Compute(layer.backward + costs.per_tensor * len(layer.tensors) + costs.per_bucket / 2)
            reductions[index] = []
            for nbytes in _cut(layer.nbytes, partition):
                cost = network.all_reduce(nbytes)
                operation = Operation(f"all-reduce {index}", cost, lambda nbytes=nbytes: returned(nbytes))  # type: ignore[misc]
                reductions[index].append(operation)
                heapq.heappush(waiting, (step, index, next(arrivals), nbytes, operation))
            admit()


def _cut(nbytes: int, partition: float) -> list[int]:
    """Sizes of partitions, as equal as can be."""
    if not nbytes:
        return []
    parts = max(1, -int(-nbytes // partition))
    return [nbytes * (part + 1) // parts - nbytes * part // parts for part in range(parts)]
