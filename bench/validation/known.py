"""The facts that predict a cell: the runs and probes that measure them, and what they say. Pure.

computation  the profile that the cell's layers follow, and how long `none` takes with it on as many ranks
thread       what our strategies and DDP add on one rank, where nothing is sent
network      a start and a time for each byte, from a probe between as many hosts
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.methods.spec import parse_spec
from bench.models.catalog import workload
from bench.train.launcher import narrowed
from bench.train.settings import Settings
from overlap.plan.simulation.network import Link
from overlap.plan.simulation.workload import Costs, Layer

__all__ = [
    "Thread",
    "alone",
    "contention",
    "ddp_thread",
    "kind_of",
    "layers_of",
    "link_of",
    "our_thread",
    "probe_of",
    "profiled",
    "references",
]

Result = Mapping[str, Any]

_CACHED = 16 * 2**20  # bytes of an operation
ONE_BUCKET, EACH_LAYER = "dear:threshold_mb=4096", "dear:threshold_mb=0"
SMALL = "narrow_mlp"  # its bytes are few, and its tensors many: what it costs is the number of these


@dataclass(frozen=True)
class Thread:
    """A method's costs beside computation, in seconds: of a gradient, of a bucket, and of each byte that it copies."""

    per_tensor: float
    per_bucket: float
    copy: float

    def costs(self, update: float) -> Costs:
        return Costs(self.per_tensor, self.per_bucket, update)


def alone(cell: Settings) -> Settings:
    """The run that measures a cell's computation, on as many ranks, without a network."""
    return replace(cell, method="none", network="local", launcher=None, warmup=2, iterations=1, batches=4)


def profiled(cell: Settings) -> Settings:
    """The run that measures the layers of a cell with real computation."""
    one = replace(alone(cell), method=ONE_BUCKET, workers=1)
    return replace(one, warmup=12, iterations=1, batches=1)  # save_profile() takes eleven steps


def references(model: str) -> dict[str, Settings]:
    """The runs on one rank, by method, that measure what the thread costs with a model's parameters."""
    chosen = workload(model)
    methods = ("none", ONE_BUCKET, "ddp", *((EACH_LAYER,) if model == SMALL else ()))
    return {
        name: Settings(
            method=name,
            model=model,
            batch_size=chosen.batch_size,
            size=chosen.size,
            emulate_compute=f"{model}@even:100",
            warmup=3,
            iterations=4,
            batches=3,
        )
        for name in methods
    }


def kind_of(cell: Settings) -> tuple[str, str]:
    """Whose collectives a cell uses, and whether halves or whole all-reduces."""
    name = parse_spec(cell.method)[0]
    return ("gloo" if name == "ddp" else "ours"), ("half" if name in ("dear", "oss") else "whole")


def probe_of(cell: Settings) -> tuple[str, int, str]:
    """The arguments of :func:`bench.validation.probe.measure` for a cell."""
    return kind_of(cell)[0], cell.workers, narrowed(cell.network, cell.dilate)


def link_of(probe: Mapping[str, Any], operation: str, largest: int = _CACHED) -> Link:
    """The link whose ring takes as long as was measured, for a model whose `largest` layer has so many bytes.

    Operations that are larger than that, and than what caches hold, do not count: they are slower. Of the others, the
    largest tell what a byte takes: there a start is nothing. What a start takes is what is left, with the least squares of
    relative errors. (Fitted together, small operations would decide both: part of a start passes while the one before is
    still on its way.)
    """
    samples = sorted((n, t) for n, t in probe["samples"][operation] if n <= max(largest, _CACHED))
    beta = samples[-1][1] / samples[-1][0]
    weights = [1 / seconds**2 for _, seconds in samples]
    alpha = sum((t - beta * n) * weight for (n, t), weight in zip(samples, weights, strict=True)) / sum(weights)
    halves, turns = (2 if operation == "whole" else 1), probe["workers"] - 1
    return Link(max(0.0, alpha) / (halves * turns), beta / (halves * turns / probe["workers"]))


def contention(probe: Mapping[str, Any], operation: str, cores: int) -> float:
    """The share by which computation takes longer while bytes move: a rank's processor time in a probe's second."""
    return float(cores * (probe["cores_busy"][operation] or 0.0) / probe["workers"])


def _median(result: Result) -> float:
    return statistics.median(result["step_seconds"])


def our_thread(
    small: Mapping[str, Result], model: Mapping[str, Result], counts: tuple[int, int], tensors: int
) -> Thread:
    """The thread costs of our strategies, from runs of :func:`references` with `small` and with the model's parameters.

    `counts`: layers and tensors of the small one; `tensors`: those of the model.
    """
    layers, small_tensors = counts
    whole = _median(small[ONE_BUCKET])
    per_bucket = max(0.0, (_median(small[EACH_LAYER]) - whole) / (layers - 1))
    per_tensor = max(0.0, (whole - _median(small["none"]) - per_bucket) / small_tensors)
    rest = _median(model[ONE_BUCKET]) - _median(model["none"]) - per_bucket - tensors * per_tensor
    return Thread(per_tensor, per_bucket, max(0.0, rest) / model["none"]["parameter_bytes"])


def ddp_thread(model: Mapping[str, Result]) -> Thread:
    """The thread costs of DDP, which copies gradients into buckets and back."""
    extra = max(0.0, _median(model["ddp"]) - _median(model["none"]))
    return Thread(0.0, 0.0, extra / model["none"]["parameter_bytes"])


def layers_of(profile: Sequence[Layer], result: Result, copy: float, *, slept: bool) -> tuple[Layer, ...]:
    """`profile` scaled to the measured time of the method `none`, with `copy` more seconds for each byte.

    Real layers become longer or shorter by a factor. Slept ones become longer by what falling asleep and waking up takes,
    and by the gradients that backward makes, which is in proportion to their bytes.
    """
    phases, nbytes = result["phase_seconds"], sum(layer.nbytes for layer in profile)
    forward, backward = sum(layer.forward for layer in profile), sum(layer.backward for layer in profile)
    if not slept:
        return tuple(
            replace(
                layer,
                forward=layer.forward * phases["forward"] / forward,
                backward=layer.backward * phases["backward"] / backward + copy * layer.nbytes,
            )
            for layer in profile
        )
    waking = max(0.0, phases["forward"] - forward) / len(profile)
    making = max(0.0, phases["backward"] - backward - waking * len(profile)) / nbytes
    return tuple(
        replace(
            layer,
            forward=layer.forward + waking,
            backward=layer.backward + waking + (making + copy) * layer.nbytes,
        )
        for layer in profile
    )
