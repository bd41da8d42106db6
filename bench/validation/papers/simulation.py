"""Simulates published jobs, as ``dear.predict`` simulates a job. Pure but for reading profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.validation.papers.published import Cell, Claim, Source
from dear.predict import guesses, methods
from overlap.plan.simulation.events import Run
from overlap.plan.simulation.methods import SIZES_MB, Method, Prediction, predict
from overlap.plan.simulation.network import Network
from overlap.plan.simulation.profile import Profile, load
from overlap.plan.simulation.schedules import all_reduced, decoupled
from overlap.plan.simulation.workload import Workload, fused, in_one_order

__all__ = ["METHODS", "Claimed", "claimed", "paced", "predicted"]

MB = 2**20
WITHIN = "pcie"  # all of these clusters


def _at_once(work: Workload, network: Network) -> Run:
    """All gradients in one all-reduce after backward: nothing overlaps."""
    return all_reduced(work, network, in_one_order(work.layers, work.nbytes, work.nbytes))


def _best_size(work: Workload, network: Network) -> Run:
    """DeAR as its paper tunes it: buckets of the size that is found to be best, and none all-reduced."""
    runs = (decoupled(work, network, fused(work.layers, size * MB)) for size in SIZES_MB)
    return min(runs, key=lambda run: run.step)


#: Those of dear.predict, and what else papers compare.
METHODS: dict[str, Method] = {
    **methods(),
    "one all-reduce": _at_once,
    "dear, best size": _best_size,
    "dear, no fusion": lambda work, network: decoupled(work, network, fused(work.layers, 0)),
}


def paced(profile: Profile, seconds: float) -> Profile:
    """The profile with its layers scaled so that together they take so many seconds, as others have measured."""
    factor = seconds / profile.seconds
    layers = tuple(
        replace(each, forward=factor * each.forward, backward=factor * each.backward) for each in profile.layers
    )
    return replace(profile, layers=layers, source="one GPU's step as published")


def predicted(source: Source, cell: Cell, *, own_pace: bool = False) -> dict[str, Prediction]:
    """The predictions for a cell, by the source's names of methods.

    `own_pace`: the profile's, and not what was published of one GPU.

    Raises ``ValueError`` for what the simulation does not know.
    """
    profile = load(cell.model, cell.profile_device, cell.profile_batch)
    if not own_pace:
        profile = paced(profile, cell.one_gpu)
    found = _all([source.methods[name] for name in cell.steps], profile, cell.network, cell.workers, cell.per_host)
    return dict(zip(cell.steps, found, strict=True))


def _all(names: Sequence[str], profile: Profile, network: str, workers: int, per_host: int) -> list[Prediction]:
    likely, *others = guesses(profile, network, WITHIN)
    return [
        predict(name, METHODS[name], profile.layers, workers, per_host=per_host, likely=likely, others=others)
        for name in names
    ]


@dataclass(frozen=True)
class Claimed:
    """A row of a claim's grid: the method that is claimed to be faster, and the others, as predicted."""

    model: str
    network: str
    group: str
    method: Prediction
    others: tuple[Prediction, ...]

    @property
    def speedups(self) -> dict[str, float]:
        return {other.method: other.step / self.method.step for other in self.others}


def claimed(claim: Claim, network: str, profile: tuple[str, str, int]) -> list[Claimed]:
    """The groups of a claim, for one model on one network."""
    layers = load(*profile)
    found = []
    for title, method, others in claim.groups:
        first, *rest = _all([method, *others], layers, network, claim.workers, claim.per_host)
        found.append(Claimed(profile[0], network, title, first, tuple(rest)))
    return found
