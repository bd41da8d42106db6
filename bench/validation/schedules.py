"""Simulates a cell from what is known. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.methods.spec import parse_spec
from dear.predict import merged, owned_by_rank
from overlap.plan.simulation.events import Run
from overlap.plan.simulation.network import Network
from overlap.plan.simulation.schedules import all_reduced, by_priority, decoupled
from overlap.plan.simulation.workload import Workload, fused, in_one_order, per_tensor

__all__ = ["KNOWN", "simulate"]

MB = 2**20
Options = Mapping[str, Any]


def _dear(work: Workload, network: Network, options: Options) -> Run:
    buckets = fused(work.layers, options["threshold_mb"] * MB)
    return decoupled(work, network, buckets, early=options.get("eager", False))


def _ddp(work: Workload, network: Network, options: Options) -> Run:
    cap = options.get("bucket_mb")  # torch closes the first bucket at 1 MB where nobody says another size
    return all_reduced(work, network, in_one_order(work.layers, (cap or 25) * MB, (cap or 1) * MB))


#: By the name of a method, what simulates it, and the options that it is simulated with.
KNOWN: dict[str, tuple[Callable[[Workload, Network, Options], Run], frozenset[str]]] = {
    "dear": (_dear, frozenset({"threshold_mb", "eager"})),
    "oss": (
        lambda work, network, options: owned_by_rank(work, network, options["threshold_mb"] * MB),
        frozenset({"threshold_mb"}),
    ),
    "wfbp": (lambda work, network, _: all_reduced(work, network, per_tensor(work.layers)), frozenset()),
    "mgwfbp": (lambda work, network, _: merged(work, network), frozenset({"profile_steps"})),
    "bytescheduler": (
        lambda work, network, options: by_priority(
            work, network, partition=options["partition_mb"] * MB, credit=options["credit_mb"] * MB
        ),
        frozenset({"partition_mb", "credit_mb"}),
    ),
    "ddp": (_ddp, frozenset({"bucket_mb"})),
}


#: What methods choose while they run, unless they are told.
_PLANNED = {"dear": ("threshold_mb",), "oss": ("threshold_mb",), "bytescheduler": ("partition_mb", "credit_mb")}


def simulate(spec: str, work: Workload, network: Network) -> Run:
    """Simulate the method that `spec` describes.

    Raises ``ValueError`` where the simulation does not know it, or an option of it.
    """
    name, options = parse_spec(spec)
    if name not in KNOWN:
        raise ValueError(f"the simulation does not know {name}; it knows {', '.join(KNOWN)}")
    method, known = KNOWN[name]
    strangers = sorted(options.keys() - known)
    if strangers:
        raise ValueError(f"the simulation of {name} does not know {', '.join(strangers)}; it knows {', '.join(known)}")
    missing = [one for one in _PLANNED.get(name, ()) if not isinstance(options.get(one), int | float)]
    if missing:
        raise ValueError(f"{spec} is planned while it runs: give it {' and '.join(missing)}")
    return method(work, network, options)
