"""Measures, once, what has to be known before a cell runs, and predicts the cell from that."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.emulation.accelerator import Accelerator, gradient_bytes
from bench.models.catalog import workload
from bench.sweep.failures import Failures
from bench.sweep.journal import Journal
from bench.sweep.runner import attempt, name_of, run_all
from bench.train.origin import Origin
from bench.train.settings import Settings
from bench.validation import known, probe
from bench.validation.schedules import simulate
from overlap.plan.simulation.network import Network
from overlap.plan.simulation.profile import from_text
from overlap.plan.simulation.workload import Layer, Workload

__all__ = ["Unknown", "Workshop"]


class Unknown(RuntimeError):
    """A cell cannot be predicted, since something could not be measured that has to be known."""


class Workshop:
    """The measurements, kept in `folder`.

    `keep`: results of other code count, too. Unless `run`, nothing is measured.
    """

    def __init__(self, folder: Path, origin: Origin, *, run: bool = True, keep: bool = False) -> None:
        self.journal = Journal(folder / "results.jsonl", origin, keep=keep)
        self.failures = Failures(folder / "failures.jsonl")
        self._logs, self._probes, self._profiles = folder / "logs", folder / "probes", folder / "profiles"
        for place in (self._logs, self._probes, self._profiles):
            place.mkdir(parents=True, exist_ok=True)
        self._origin, self._run, self._keep = origin, run, keep

    def run(self, settings: Settings, tries: int = 2) -> Mapping[str, Any] | None:
        """The result of a run; None where it fails."""
        if self._run and self.journal.get(settings) is None:
            run_all([settings], self.journal, self.failures, self._logs, tries)
        return self.journal.get(settings)

    def _needed(self, settings: Settings) -> Mapping[str, Any]:
        result = self.run(settings)
        if result is None:
            raise Unknown(f"{name_of(settings)} has no result")
        return result

    def _references(self, cell: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
        ours, model = known.references(known.SMALL), known.references(cell.model)
        return {n: self._needed(s) for n, s in ours.items()}, {n: self._needed(s) for n, s in model.items()}

    def _probe(self, kind: str, hosts: int, rate: str) -> Mapping[str, Any]:
        path = self._probes / f"{kind}-{hosts}x{rate}.json"
        found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        if self._run and (found is None or not (self._keep or found["origin"] == self._origin.to_dict())):
            found = {**probe.measure(kind, hosts, rate), "origin": self._origin.to_dict()}
            path.write_text(json.dumps(found))
        if found is None:
            raise Unknown(f"{path.name} has not been measured")
        return found

    def _profile(self, cell: Settings) -> tuple[Layer, ...]:
        """The layers of a cell as they are without a network: slept, or measured."""
        sizes = _sizes(cell.model)
        if cell.emulate_compute is not None:
            with torch.device("meta"):
                skeleton = workload(cell.model).build()
            layers = Accelerator.named(cell.emulate_compute, cell.batch_size).profile(skeleton).layers
            by_name = {layer.name: layer for layer in layers}
            return tuple(
                Layer(name, cell.dilate * by_name[name].forward, cell.dilate * by_name[name].backward, tensors)
                for name, tensors in sizes.items()
            )
        run = known.profiled(cell)
        path = self._profiles / f"{name_of(run)}.json"
        stamp = path.with_suffix(".origin")
        there = stamp.exists() and (self._keep or stamp.read_text() == str(self._origin))
        if self._run and not there:
            _, reason, _ = attempt(run, self._logs / f"profile-{name_of(run)}.log", ["--profile", str(path)])
            if reason:
                raise Unknown(f"the layers of {cell.model} could not be measured: {reason}")
            stamp.write_text(str(self._origin))
        if not path.exists():
            raise Unknown(f"{path.name} has not been measured")
        return from_text(path.read_text()).layers

    def predict(self, cell: Settings) -> float:
        """The predicted seconds of a step. Raises :class:`Unknown`, ``ValueError``, and what a probe raises."""
        compute = self._needed(known.alone(cell))
        small, model = self._references(cell)
        link = self._probe(*known.probe_of(cell))
        kind, operation = known.kind_of(cell)
        sizes = _sizes(cell.model)
        if kind == "gloo":
            thread = known.ddp_thread(model)
        else:
            counts = _count(_sizes(known.SMALL))
            thread = known.our_thread(small, model, counts, _count(sizes)[1])
        slept = cell.emulate_compute is not None
        layers = known.layers_of(self._profile(cell), compute, thread.copy, slept=slept)
        costs = thread.costs(compute["phase_seconds"]["step"] / compute["parameter_bytes"])
        work = Workload(layers, costs)
        if not slept:
            work = replace(work, contention=known.contention(link, operation, os.cpu_count() or 1))
        return simulate(
            cell.method, work, Network(cell.workers, known.link_of(link, operation, max(map(sum, sizes.values()))))
        ).step


def _sizes(model: str) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return gradient_bytes(workload(model).build())


def _count(sizes: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """Layers and tensors."""
    return len(sizes), sum(map(len, sizes.values()))
