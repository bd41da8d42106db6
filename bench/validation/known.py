"""What has to be known before a cell runs: the runs and probes that measure it, and what these say. Pure.

computation  the profile that the cell's layers follow, and how long `none` takes with it on as many ranks
thread       what the method adds on one rank, where nothing is sent
network      a start and a time for each byte, from a probe between as many hosts
cores        processor seconds of a start and of each byte, from the same probe, where computation is real
memory       what a rank takes without a network, for a plan under a limit
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
from overlap.plan.simulation.events import Cost
from overlap.plan.simulation.network import Link, Network
from overlap.plan.simulation.workload import Costs, Layer

__all__ = [
    "SMALL",
    "Probed",
    "Thread",
    "adding_thread",
    "alone",
    "kind_of",
    "layers_of",
    "link_of",
    "named",
    "needed",
    "our_thread",
    "per_gradient",
    "probe_of",
    "profiled",
    "references",
    "roomy",
]

Result = Mapping[str, Any]

_CACHED = 16 * 2**20  # bytes of an operation
ONE_BUCKET, EACH_LAYER = "dear:threshold_mb=4096", "dear:threshold_mb=0"
SMALL = "narrow_mlp"  # its bytes are few, and its tensors many: what it costs is the number of these
#: Methods whose thread copies, gathers and frees: what this one adds on one rank is laid upon the bytes.
ADDING = {"ddp": "ddp", "fsdp2": "fsdp2", "fsdp": "fsdp", "osdp": "fsdp"}
_KINDS = {"ddp": "gloo", "fsdp2": "gloo", "horovod": "horovod"}
ROOMY = "osdp:memory_limit_gb=1024"  # a limit under which every bucket stays whole


@dataclass(frozen=True)
class Thread:
    """A method's costs beside computation, in seconds: of a gradient, of a bucket, and of each byte that it copies."""

    per_tensor: float
    per_bucket: float
    copy: float

    def costs(self, update: float) -> Costs:
        return Costs(self.per_tensor, self.per_bucket, update)


@dataclass(frozen=True)
class Probed:
    """A network as a probe found it: by operation, the ring that takes as long, and the processor seconds of each rank.

    ``half`` stands for reduce-scatters and for all-gathers where these were not probed apart.
    """

    workers: int
    rings: Mapping[str, Network]
    handling: Mapping[str, tuple[float, float]]  # seconds of a start, and of each byte

    @classmethod
    def of(cls, probe: Mapping[str, Any], largest: int = _CACHED) -> Probed:
        """The network of a probe, for a model whose `largest` layer has so many bytes."""
        workers = probe["workers"]
        return cls(
            workers,
            {name: Network(workers, link_of(probe, name, largest)) for name in probe["samples"]},
            {name: _handling(probe, name, largest) for name in probe["samples"]},
        )

    def _half(self, operation: str, nbytes: float) -> Cost:
        name = operation if operation in self.rings else "half"
        return self._handled(name, nbytes, self.rings[name].half(nbytes))

    def _handled(self, name: str, nbytes: float, cost: Cost) -> Cost:
        start, byte = self.handling[name]
        return replace(cost, processor=start + byte * nbytes)

    def reduce_scatter(self, nbytes: float) -> Cost:
        return self._half("scatter", nbytes)

    def all_gather(self, nbytes: float) -> Cost:
        return self._half("gather", nbytes)

    def all_reduce(self, nbytes: float) -> Cost:
        return self._handled("whole", nbytes, self.rings["whole"].all_reduce(nbytes))


# - What is measured


def alone(cell: Settings) -> Settings:
    """The run that measures a cell's computation, on as many ranks, without a network."""
    return replace(cell, method="none", network="local", launcher=None, warmup=2, iterations=1, batches=4)


def profiled(cell: Settings) -> Settings:
    """The run that measures the layers of a cell with real computation."""
    one = replace(alone(cell), method=ONE_BUCKET, workers=1)
    return replace(one, warmup=12, iterations=1, batches=1)  # save_profile() takes eleven steps


def roomy(cell: Settings) -> Settings:
    """The run that measures the memory of a cell of `osdp`, on as many ranks, without a network, under no limit."""
    return replace(alone(cell), method=ROOMY)


def references(cell: Settings) -> tuple[dict[str, Settings], dict[str, Settings]]:
    """The runs on one rank, by method, that measure what a cell's thread costs: with :data:`SMALL`, and with its model."""
    name = parse_spec(cell.method)[0]
    small: tuple[str, ...]
    if name in ADDING:
        small, model = (), ("none", ADDING[name])
    elif name == "horovod":
        small, model = ("none", "horovod"), ("none", "ddp")
    else:
        small, model = ("none", ONE_BUCKET, EACH_LAYER), ("none", ONE_BUCKET)
    return {each: _on_one_rank(each, SMALL) for each in small}, {each: _on_one_rank(each, cell.model) for each in model}


def _on_one_rank(method: str, model: str) -> Settings:
    chosen = workload(model)
    return Settings(
        method=method,
        model=model,
        batch_size=chosen.batch_size,
        size=chosen.size,
        emulate_compute=f"{model}@even:100",
        warmup=3,
        iterations=4,
        batches=3,
    )


def needed(cell: Settings) -> list[Settings]:
    """All runs that a cell's prediction needs, but for the one that is :func:`profiled`."""
    memory = [roomy(cell)] if parse_spec(cell.method)[0] == "osdp" else []
    return [alone(cell), *(run for several in references(cell) for run in several.values()), *memory]


def kind_of(cell: Settings) -> str:
    """Whose collectives a cell uses."""
    return _KINDS.get(parse_spec(cell.method)[0], "ours")


def probe_of(cell: Settings) -> tuple[str, int, str]:
    """The arguments of :func:`bench.validation.probe.measure` for a cell."""
    return kind_of(cell), cell.workers, narrowed(cell.network, cell.dilate)


def named(kind: str, hosts: int, rate: str) -> str:
    """The name of a probe."""
    return f"{kind}-{hosts}x{rate}"


# - What it says


def _line(samples: Sequence[Sequence[float]], largest: int) -> tuple[float, float]:
    """What a start takes, and a byte, by pairs of bytes and seconds of operations.

    Operations that are larger than the `largest` layer, and than what caches hold, do not count: they are slower. Of the
    others, the largest tell what a byte takes: there a start is nothing. What a start takes is what is left, with the least
    squares of relative errors. (Fitted together, small operations would decide both: part of a start passes while the one
    before is still on its way.)
    """
    some = sorted((nbytes, seconds) for nbytes, seconds in samples if nbytes <= max(largest, _CACHED) and seconds > 0)
    if not some:
        return 0.0, 0.0
    byte = some[-1][1] / some[-1][0]
    weights = [1 / seconds**2 for _, seconds in some]
    start = sum((t - byte * n) * weight for (n, t), weight in zip(some, weights, strict=True)) / sum(weights)
    return max(0.0, start), byte


def link_of(probe: Mapping[str, Any], operation: str, largest: int = _CACHED) -> Link:
    """The link whose ring takes as long as was measured, for a model whose `largest` layer has so many bytes."""
    start, byte = _line(probe["samples"][operation], largest)
    halves, turns = (2 if operation == "whole" else 1), probe["workers"] - 1
    return Link(start / (halves * turns), byte / (halves * turns / probe["workers"]))


def _handling(probe: Mapping[str, Any], operation: str, largest: int) -> tuple[float, float]:
    """The processor seconds of each rank that a start takes, and a byte.

    To those of the rank's process comes what the kernel does beside: it sends and receives in soft interrupts, too, for
    which no process is charged while a core idles. They make all cores busier than the processes of all ranks.
    """
    start, byte = _line(probe["processor"][operation], largest)
    busy, processes = probe["cores_busy"][operation], probe["processes_busy"][operation]
    beside = max(1.0, busy / processes) if busy and processes else 1.0
    return beside * start, beside * byte


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


def adding_thread(model: Mapping[str, Result], method: str) -> Thread:
    """The thread costs of a method that copies, gathers and frees parameters or gradients: what it adds, by bytes."""
    extra = max(0.0, _median(model[method]) - _median(model["none"]))
    return Thread(0.0, 0.0, extra / model["none"]["parameter_bytes"])


def per_gradient(small: Mapping[str, Result], method: str, tensors: int) -> float:
    """The seconds of a gradient that `method` is handed, of which :data:`SMALL` has so many."""
    return max(0.0, _median(small[method]) - _median(small["none"])) / tensors


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
