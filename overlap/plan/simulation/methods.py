"""Predicts a step's time, by method, from what is known and guessed about a job. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from overlap.plan.early import spread
from overlap.plan.simulation.events import Run
from overlap.plan.simulation.network import Link, Medium, Network
from overlap.plan.simulation.schedules import all_reduced, by_priority, decoupled, negotiated
from overlap.plan.simulation.workload import Bucket, Costs, Layer, Workload, fused, in_one_order, per_tensor

__all__ = [
    "METHODS",
    "PARTITIONS_MB",
    "SIZES_MB",
    "Guess",
    "Method",
    "Prediction",
    "auto_threshold",
    "planned",
    "predict",
    "sizes_near",
]

MB = 2**20
_AUTO = 32, 1 * MB, 25 * MB  # as `overlap.plan.fusion` fuses: a so many'th of the model, at least and at most

Method = Callable[[Workload, Network], Run]
#: What planners begin with: MB of a bucket, and ByteScheduler's partitions and credit.
SIZES_MB = (1.0, 2.0, 4.0, 8.0, 25.0, 64.0)
PARTITIONS_MB = ((1.0, 2.0), (4.0, 8.0), (2.0, 4.0), (0.5, 1.0), (4.0, 16.0), (16.0, 64.0))
_SIZE_STEPS = (0.5, 0.7, 1.4, 2.0)  # what they go on with, from the smallest size on: small models need small buckets
_SMALLEST_MB = 0.25
_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2)  # of buckets that are all-reduced, up to the most that dear plans


def auto_threshold(work: Workload) -> float:
    """The bucket size in bytes that `overlap.plan.fusion` chooses by itself."""
    parts, least, most = _AUTO
    return min(max(work.nbytes / parts, least), most)


def sizes_near(mb: float) -> list[float]:
    """Bucket sizes, in MB, that a planner tries beside this one."""
    return [mb * factor for factor in _SIZE_STEPS if _SMALLEST_MB <= mb * factor <= SIZES_MB[-1]]


def planned(work: Workload, network: Medium) -> Run:
    """Simulate `dear` with its own choice: the best bucket size, then the best share of buckets to all-reduce."""
    runs: dict[float, tuple[Run, list[Bucket]]] = {}

    def look(sizes: Iterable[float]) -> float:
        for size in sizes:
            if size not in runs:
                buckets = fused(work.layers, size * MB)
                runs[size] = decoupled(work, network, buckets), buckets
        return min(runs, key=lambda size: runs[size][0].step)

    best_size = look(SIZES_MB)
    while best_size != (better := look(sizes_near(best_size))):
        best_size = better
    best, buckets = runs[best_size]
    for share in _SHARES:
        last = len(buckets) - 1  # the first one that is reduced
        whole = [last - place for place in spread(len(buckets), round(share * len(buckets)))]
        best = min(best, decoupled(work, network, buckets, whole=whole), key=lambda run: run.step)
    return best


def scheduled(work: Workload, network: Medium) -> Run:
    """Simulate our ByteScheduler with its own choice of partitions and credit."""
    sizes = ((part * MB, credit * MB) for part, credit in PARTITIONS_MB)
    runs = (by_priority(work, network, partition=part, credit=credit, steps=4) for part, credit in sizes)
    return min(runs, key=lambda run: run.step)


#: By name; each with the settings that it has as it comes, but where the name says others.
METHODS: dict[str, Callable[[Workload, Medium], Run]] = {
    "dear": planned,
    "dear, early updates": lambda work, network: decoupled(
        work, network, fused(work.layers, auto_threshold(work)), early=True
    ),
    "dear, 25 MB": lambda work, network: decoupled(work, network, fused(work.layers, 25 * MB)),
    "wfbp": lambda work, network: all_reduced(work, network, per_tensor(work.layers)),
    "bytescheduler": scheduled,
    "bytescheduler, 16 and 64 MB": lambda work, network: by_priority(work, network, partition=16 * MB, credit=64 * MB),
    "DDP": lambda work, network: all_reduced(work, network, in_one_order(work.layers, 25 * MB, MB)),
    "Horovod": lambda work, network: negotiated(work, network, threshold=128 * MB, cycle=1e-3),
}


@dataclass(frozen=True, slots=True)
class Guess:
    """A guess of a job's costs and links. `pace`: by how much computation takes longer than the layers say."""

    pace: float
    costs: Costs
    between: Link
    within: Link

    def work(self, layers: Sequence[Layer]) -> Workload:
        timed = (replace(each, forward=each.forward * self.pace, backward=each.backward * self.pace) for each in layers)
        return Workload(tuple(timed), self.costs)

    def network(self, workers: int, per_host: int) -> Network:
        if workers < 1 or per_host < 1:
            raise ValueError(f"there should be at least one worker, and one on each host, not {workers} and {per_host}")
        return Network(workers, self.between, per_host, self.within)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted seconds of a step of `method`: the likely ones, and the best and worst of the guesses."""

    method: str
    step: float
    best: float
    worst: float
    alone: float
    wire: float
    waits: dict[str, float]

    @property
    def efficiency(self) -> float:
        """The share of the throughput that as many independent processes would have."""
        return self.alone / self.step

    @property
    def bound(self) -> float:
        """The seconds below which no schedule comes that computes this and sends these bytes."""
        return max(self.alone, self.wire)

    @property
    def cause(self) -> str:
        """The cause for which the step waits most."""
        if self.step < 1.01 * self.alone:
            return "computation"
        by_kind: dict[str, float] = {}
        for label, seconds in self.waits.items():
            kind = label.rstrip("0123456789 ") + "s" if label[-1].isdigit() else label
            by_kind[kind] = by_kind.get(kind, 0.0) + seconds
        return max(by_kind, key=lambda kind: by_kind[kind]) if by_kind else "the training thread"


def predict(
    name: str,
    method: Method,
    layers: Sequence[Layer],
    workers: int,
    *,
    per_host: int,
    likely: Guess,
    others: Sequence[Guess],
) -> Prediction:
    """Predict a step of `method` on `workers` ranks, `per_host` on each host.

    `others`: guesses that may be as right as the `likely` one.

    Raises ``ValueError`` where the workers do not fill their hosts.
    """
    work, network = likely.work(layers), likely.network(workers, min(per_host, workers))
    run = method(work, network)
    elsewhere = (method(guess.work(layers), guess.network(workers, min(per_host, workers))) for guess in others)
    steps = [run.step, *(other.step for other in elsewhere)]
    wire = network.all_reduce(work.nbytes).transfer
    return Prediction(name, run.step, min(steps), max(steps), work.alone, wire, run.waits)
