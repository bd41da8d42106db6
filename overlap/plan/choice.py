"""Chooses the fastest of a strategy's settings, by simulating what was measured (pure).

Candidates are simulated first, then the neighbours of the best one, until none is better.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from overlap.plan.partition import TensorSpec
from overlap.plan.plan import Plan
from overlap.plan.simulation.events import Run
from overlap.plan.simulation.network import Medium
from overlap.plan.simulation.workload import Bucket, Workload
from overlap.plan.strategy import PlannedStrategy
from overlap.plan.tuning.space import Setting

__all__ = ["Choice", "Job", "choose", "simulated"]

_MOST = 60  # simulations; each takes some milliseconds of rank 0
_SAME = 1.003  # times that are nearer to each other than this are the same: the simpler setting is taken


@dataclass(frozen=True)
class Job:
    """A workload and the network that it trains on.

    `layer_of`: by slot, the layer of `work` that its parameter is in.
    """

    work: Workload
    network: Medium
    specs: Sequence[TensorSpec]
    layer_of: dict[int, int]


@dataclass(frozen=True)
class Choice:
    """The chosen `setting`, with the simulated `seconds` of a step, and those `before`; so many settings were `tried`.

    So many settings were `tried`.
    """

    setting: Setting
    seconds: float
    before: float
    tried: int


def simulated(strategy: PlannedStrategy, plan: Plan, job: Job) -> Run:
    """Simulate a step with these buckets."""
    buckets: list[Bucket] = []
    whole: set[int] = set()
    known = [
        (bucket, [job.layer_of[index] for index in bucket.spec.tensors if index in job.layer_of]) for bucket in plan
    ]
    for bucket, layers in sorted((one for one in known if one[1]), key=lambda one: min(one[1])):
        spec = bucket.spec
        if not bucket.sharded:
            whole.add(len(buckets))
        size = job.specs[spec.tensors[0]].itemsize
        shares = None if spec.counts is None else tuple(numel * size for numel in spec.counts)
        buckets.append(Bucket(min(layers), max(layers), spec.padded_numel * size, len(spec.tensors), shares))
    return strategy.simulate(job.work, job.network, buckets, whole)


def choose(
    current: PlannedStrategy,
    preview: Callable[[PlannedStrategy], Plan],
    job: Job,
    fits: Callable[[Plan], bool] = lambda _plan: True,
    enough: Callable[[], bool] = lambda: False,
) -> Choice:
    """Choose the best of `current`'s settings that fit. `preview` gives the plan that a strategy would make.

    The search ends early when it is `enough`.
    """
    runs: dict[Hashable, tuple[float, PlannedStrategy]] = {}

    def cost(strategy: PlannedStrategy) -> None:
        plan = preview(strategy)
        key = plan, strategy.conduct
        if key not in runs and (strategy is current or fits(plan)):
            runs[key] = simulated(strategy, plan, job).step, strategy

    cost(current)
    before = next(iter(runs.values()))[0]
    for candidate in current.candidates:
        if not enough():
            cost(candidate)
    while len(runs) < _MOST and not enough():
        _, best = _simplest(list(runs.values()))
        known = len(runs)
        for neighbour in best.neighbours:
            if not enough():
                cost(neighbour)
        if len(runs) == known:
            break
    seconds, best = _simplest(list(runs.values()))
    return Choice(dict(best.planned), seconds, before, len(runs))


def _simplest(found: Sequence[tuple[float, PlannedStrategy]]) -> tuple[float, PlannedStrategy]:
    fastest = min(seconds for seconds, _ in found)
    same = [one for one in found if one[0] <= _SAME * fastest]
    return min(same, key=lambda one: one[1].burden)
