"""Simulates a cell from what is known. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from bench.methods.spec import parse_spec
from dear.predict import merged, owned_by_rank
from osdp.choice import Job, simulated
from osdp.memory_plan import GB, MemoryPlan, made
from overlap.plan.plan import Residency
from overlap.plan.simulation.events import Run
from overlap.plan.simulation.methods import auto_threshold, planned, scheduled
from overlap.plan.simulation.network import Medium
from overlap.plan.simulation.schedules import all_reduced, by_priority, decoupled, negotiated
from overlap.plan.simulation.sharded import awaited, sharded
from overlap.plan.simulation.workload import Bucket, Workload, fused, in_one_order, per_tensor

__all__ = ["KNOWN", "Subject", "freed_bytes", "simulate"]

MB = 2**20
Options = Mapping[str, Any]
_AHEAD = 4  # buckets that sharded models may have whole beside those that are used


@dataclass(frozen=True)
class Subject:
    """A cell as it is simulated: its work and network, and what only some methods ask for.

    `units`: numbers of the layers of each of FSDP2's. `copy`: seconds of a byte that Horovod's thread copies. `freed`: the
    bytes of memory that a rank takes at most where every bucket is freed after its use.
    """

    work: Workload
    network: Medium
    units: Sequence[Sequence[int]] = ()
    copy: float = 0.0
    freed: int = 0


def _dear(subject: Subject, options: Options) -> Run:
    work, network = subject.work, subject.network
    threshold, early = options.get("threshold_mb"), options.get("eager", False)
    if threshold is None and not early:
        return planned(work, network)
    return decoupled(work, network, fused(work.layers, _bytes(work, threshold)), early=early)


def _bytes(work: Workload, threshold_mb: float | None) -> float:
    return auto_threshold(work) if threshold_mb is None else threshold_mb * MB


def _oss(subject: Subject, options: Options) -> Run:
    threshold = options.get("threshold_mb")
    return owned_by_rank(subject.work, subject.network, None if threshold is None else threshold * MB)


def _bytescheduler(subject: Subject, options: Options) -> Run:
    partition, credit = options.get("partition_mb"), options.get("credit_mb")
    if partition is None and credit is None:
        return scheduled(subject.work, subject.network)
    if partition is None or credit is None:
        raise ValueError("of bytescheduler, partition_mb and credit_mb are simulated together: give both, or neither")
    return by_priority(subject.work, subject.network, partition=partition * MB, credit=credit * MB)


def _ddp(subject: Subject, options: Options) -> Run:
    cap = options.get("bucket_mb")  # torch closes the first bucket at 1 MB where nobody says another size
    buckets = in_one_order(subject.work.layers, (cap or 25) * MB, (cap or 1) * MB)
    return all_reduced(subject.work, subject.network, buckets)


def _horovod(subject: Subject, options: Options) -> Run:
    threshold, cycle = options.get("fusion_mb") or 128, options.get("cycle_ms") or 1
    return negotiated(subject.work, subject.network, threshold=threshold * MB, cycle=1e-3 * cycle, copy=subject.copy)


def _fsdp2(subject: Subject, options: Options) -> Run:
    layers = subject.work.layers
    units = sorted(subject.units, key=min)
    buckets = [
        Bucket(
            min(unit),
            max(unit),
            sum(layers[number].nbytes for number in unit),
            sum(len(layers[number].tensors) for number in unit),
        )
        for unit in units
    ]
    return awaited(subject.work, subject.network, buckets, reshard=bool(options.get("reshard", True)))


def _sharded_buckets(work: Workload, options: Options) -> tuple[list[Bucket], int]:
    """Buckets, and the bytes that may be whole beside those that are used."""
    buckets = fused(work.layers, _bytes(work, options.get("threshold_mb")))
    return buckets, _AHEAD * int(median(bucket.nbytes for bucket in buckets))


def _fsdp(subject: Subject, options: Options) -> Run:
    buckets, room = _sharded_buckets(subject.work, options)
    return sharded(subject.work, subject.network, buckets, room=room)


def _plan(subject: Subject, options: Options, freed: int) -> MemoryPlan:
    buckets, room = _sharded_buckets(subject.work, options)
    names = [subject.work.layers[bucket.first].name for bucket in buckets]
    return MemoryPlan(
        job=Job(names, buckets, subject.work, subject.network, room),
        residencies=(Residency.FREED,) * len(buckets),
        ranks=subject.network.workers,
        limit=int(options["memory_limit_gb"] * GB),
        in_passes=freed,
        in_step=0,
        modules=tuple((name,) for name in names),
        timed=True,
        pinned={},
    )


def _osdp(subject: Subject, options: Options) -> Run:
    plan = made(_plan(subject, options, subject.freed))
    return simulated(plan.job, *plan.choice)


def freed_bytes(subject: Subject, options: Options, peak: int) -> int:
    """The bytes that a rank of `osdp` takes where all buckets are freed, where it took `peak` while all stayed whole."""
    plan = _plan(subject, options, 0)
    kept = replace(plan, residencies=(Residency.FREED_AFTER_BACKWARD,) * len(plan.residencies))
    return peak - kept.more


#: By the name of a method, what simulates it, and the options that it is simulated with.
KNOWN: dict[str, tuple[Callable[[Subject, Options], Run], frozenset[str]]] = {
    "dear": (_dear, frozenset({"threshold_mb", "eager"})),
    "oss": (_oss, frozenset({"threshold_mb"})),
    "wfbp": (
        lambda subject, _: all_reduced(subject.work, subject.network, per_tensor(subject.work.layers)),
        frozenset(),
    ),
    "mgwfbp": (lambda subject, _: merged(subject.work, subject.network), frozenset({"profile_steps"})),
    "bytescheduler": (_bytescheduler, frozenset({"partition_mb", "credit_mb"})),
    "ddp": (_ddp, frozenset({"bucket_mb"})),
    "horovod": (_horovod, frozenset({"fusion_mb", "cycle_ms"})),
    "fsdp2": (_fsdp2, frozenset({"reshard"})),
    "fsdp": (_fsdp, frozenset({"threshold_mb"})),
    "osdp": (_osdp, frozenset({"threshold_mb", "memory_limit_gb"})),
}


def simulate(spec: str, subject: Subject) -> Run:
    """Simulate the method that `spec` describes; what its planner would choose, as the planner chooses it.

    Raises ``ValueError`` where the simulation does not know it, or an option of it.
    """
    name, options = parse_spec(spec)
    if name not in KNOWN:
        raise ValueError(f"the simulation does not know {name}; it knows {', '.join(KNOWN)}")
    method, known = KNOWN[name]
    strangers = sorted(options.keys() - known)
    if strangers:
        raise ValueError(f"the simulation of {name} does not know {', '.join(strangers)}; it knows {', '.join(known)}")
    if name == "osdp" and not isinstance(options.get("memory_limit_gb"), int | float):
        raise ValueError(f"{spec} finds its limit while it runs: give it memory_limit_gb")
    return method(subject, options)
