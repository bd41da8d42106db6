"""The facts that were measured before a cell runs, and the prediction that follows from them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bench.emulation.accelerator import OWN, Accelerator, gradient_bytes, owners
from bench.methods.fsdp import UNIT_BYTES, units
from bench.methods.spec import parse_spec
from bench.models.catalog import workload
from bench.sweep.journal import key
from bench.sweep.runner import name_of
from bench.train.settings import Settings
from bench.validation import known
from bench.validation.schedules import Subject, freed_bytes, simulate
from osdp.memory_plan import GB
from overlap.plan.simulation.cores import Cores
from overlap.plan.simulation.profile import from_text
from overlap.plan.simulation.workload import Layer, Workload

__all__ = ["Facts", "Unknown", "predict"]


class Unknown(RuntimeError):
    """A cell cannot be predicted, since something was not measured that has to be known."""


@dataclass(frozen=True)
class Facts:
    """What was measured on a machine of so many `cores`.

    `runs`: results, by :func:`bench.sweep.journal.key`. `probes`: by their names. `profiles`: measured ones as text, by the
    names of their runs.
    """

    cores: int
    runs: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    probes: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    profiles: dict[str, str] = field(default_factory=dict)

    def run(self, settings: Settings) -> Mapping[str, Any]:
        return _there(self.runs, key(settings.to_dict()), name_of(settings))

    def probe(self, cell: Settings) -> Mapping[str, Any]:
        name = known.named(*known.probe_of(cell))
        return _there(self.probes, name, f"the probe {name}")

    def profile(self, cell: Settings) -> tuple[Layer, ...]:
        """The layers of a cell as they are without a network: slept, or measured."""
        if cell.emulate_compute is None:
            name = name_of(known.profiled(cell))
            return from_text(_there(self.profiles, name, f"the profile {name}")).layers
        with torch.device("meta"):
            skeleton = workload(cell.model).build()
        layers = Accelerator.named(cell.emulate_compute, cell.batch_size).profile(skeleton).layers
        by_name = {layer.name: layer for layer in layers}
        return tuple(
            Layer(name, cell.dilate * by_name[name].forward, cell.dilate * by_name[name].backward, tensors)
            for name, tensors in gradient_bytes(skeleton).items()
        )


def _there(found: Mapping[str, Any], name: str, told: str) -> Any:
    if name not in found:
        raise Unknown(f"{told} has not been measured")
    return found[name]


def predict(cell: Settings, facts: Facts) -> float:
    """The predicted seconds of a step. Raises :class:`Unknown` and ``ValueError``."""
    compute, probe = facts.run(known.alone(cell)), facts.probe(cell)
    thread, copy = _thread(cell, facts)
    slept = cell.emulate_compute is not None
    layers = known.layers_of(facts.profile(cell), compute, thread.copy, slept=slept)
    costs = thread.costs(compute["phase_seconds"]["step"] / compute["parameter_bytes"])
    work = Workload(layers, costs, None if slept else Cores(facts.cores, cell.workers, cell.threads))
    network = known.Probed.of(probe, max(layer.nbytes for layer in layers))
    subject = Subject(work, network, copy=copy)
    name, options = parse_spec(cell.method)
    if name == "fsdp2":
        subject = replace(subject, units=_units(cell, layers))
    if name == "osdp":
        kept = facts.run(known.roomy(cell))
        limit = parse_spec(known.ROOMY)[1]["memory_limit_gb"] * GB
        subject = replace(subject, freed=freed_bytes(subject, options, int(kept["limit_share"] * limit)))
    return simulate(cell.method, subject).step


def _thread(cell: Settings, facts: Facts) -> tuple[known.Thread, float]:
    """What a cell's thread costs, and what its method's own thread takes to copy a byte."""
    name = parse_spec(cell.method)[0]
    small, model = ({each: facts.run(run) for each, run in some.items()} for some in known.references(cell))
    small_layers, small_tensors = _count(_sizes(known.SMALL))
    if name in known.ADDING:
        return known.adding_thread(model, known.ADDING[name]), 0.0
    if name == "horovod":
        both_ways = known.adding_thread(model, "ddp").copy  # into a bucket and out of it, as Horovod copies
        return known.Thread(known.per_gradient(small, name, small_tensors), 0.0, 0.0), both_ways / 2
    return known.our_thread(small, model, (small_layers, small_tensors), _count(_sizes(cell.model))[1]), 0.0


def _units(cell: Settings, layers: Sequence[Layer]) -> list[list[int]]:
    """The numbers of the layers of each of FSDP2's units; what is in none of them is the root's."""
    chosen = workload(cell.model)
    with torch.device("meta"):
        if cell.emulate_compute is None:
            model = chosen.build()
        else:
            model = Accelerator.named(cell.emulate_compute, cell.batch_size).model(chosen, cell.dilate)
    numbers = {layer.name: number for number, layer in enumerate(layers)}
    number_of = {
        id(module): numbers[name if name in numbers else name.rpartition(OWN)[0].rstrip(".")]
        for name, module, _ in owners(model)
    }
    found = [
        [number_of[id(each)] for each in unit.modules() if id(each) in number_of] for unit in units(model, UNIT_BYTES)
    ]
    left = set(numbers.values()).difference(*found)
    return [*found, *([sorted(left)] if left else [])]


def _sizes(model: str) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return gradient_bytes(workload(model).build())


def _count(sizes: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """Layers and tensors."""
    return len(sizes), sum(map(len, sizes.values()))
