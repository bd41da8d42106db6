"""Measures how long each layer of the user's model takes while it trains, for ``python -m dear.predict``.

forward    from where a layer has its parameters to where the next one is entered: waits at gates do not count
backward   from one layer's last gradient to the next one's; the loss counts to the layer that comes first
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from overlap.plan.simulation.profile import Profile, to_text
from overlap.plan.simulation.workload import Layer

__all__ = ["LayerTimes", "ProfileWriter", "durations", "measurable"]

_Lap = dict[str, dict[str, float]]  # by kind and layer, seconds of `time.perf_counter`


class LayerTimes:
    """Stamps the clock around the layers of `model` that hold parameters, until :meth:`remove`. On one rank.

    `waited`: the seconds so far that this rank has waited for others inside of passes; the clock stands still meanwhile.

    Raises ``ValueError`` for a model without trained parameters, and for one on a GPU, whose times the host does not see.
    """

    def __init__(self, model: torch.nn.Module, waited: Callable[[], float] = float) -> None:
        self._waited = waited
        seen: set[int] = set()
        self.tensors: dict[str, tuple[int, ...]] = {}
        self._handles: list[RemovableHandle] = []
        self._lap: _Lap = {}
        self._first: str | None = None
        for name, module in model.named_modules():
            owned = [p for p in module._parameters.values() if p is not None and p.requires_grad and id(p) not in seen]
            seen.update(id(parameter) for parameter in owned)
            if owned:
                self._watch(name or type(module).__name__, module, owned)
        if not self.tensors:
            raise ValueError("the model has no parameters that are trained: there is nothing to measure")

    def _watch(self, name: str, module: torch.nn.Module, owned: Sequence[torch.nn.Parameter]) -> None:
        for parameter in owned:
            if parameter.device.type != "cpu":
                self.remove()
                raise ValueError(
                    f"parameters of {name!r} are on {parameter.device}, whose times the host's clock does not show; in "
                    "dear's repository, python -m bench.gpu.layers measures models there"
                )
            self._handles.append(parameter.register_post_accumulate_grad_hook(lambda _p: self._stamp("gradient", name)))
        self.tensors[name] = tuple(parameter.nbytes for parameter in owned)
        # The gate stands between them, and may wait.
        self._handles.append(module.register_forward_pre_hook(lambda *_: self._enter(name), prepend=True))
        self._handles.append(module.register_forward_pre_hook(lambda *_: self._stamp("begun", name)))
        self._handles.append(module.register_forward_hook(lambda *_: self._stamp("ended", name)))

    def _enter(self, name: str) -> None:
        if torch._C._current_graph_task_id() >= 0:
            return  # a checkpoint recomputes it: that is backward's time
        if self._first in (None, name):  # another pass: the last one of a step counts
            self._first, self._lap = name, {}
        self._lap.setdefault("entered", {}).setdefault(name, self._now())

    def _stamp(self, kind: str, name: str) -> None:
        if kind != "gradient" and torch._C._current_graph_task_id() >= 0:
            return
        self._lap.setdefault(kind, {})[name] = self._now()

    def _now(self) -> float:
        return time.perf_counter() - self._waited()

    def lap(self) -> _Lap:
        """The time stamps since the last lap."""
        lap, self._lap, self._first = self._lap, {}, None
        return lap

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def durations(laps: Sequence[_Lap]) -> dict[str, tuple[float, float]]:
    """Seconds of forward and backward by layer, in the order of forward: medians over `laps`. Pure.

    Layers without a gradient take no time in backward; a pass without gradients does not count.
    """
    forward: dict[str, list[float]] = {}
    backward: dict[str, list[float]] = {}
    for lap in laps:
        entered, gradients = lap.get("entered", {}), lap.get("gradient", {})
        if not entered or not gradients:
            continue
        order = sorted(entered, key=entered.__getitem__)
        ends = [entered[name] for name in order[1:]] + [max(lap["ended"].values())]
        for name, end in zip(order, ends, strict=True):
            forward.setdefault(name, []).append(max(0.0, end - lap["begun"][name]))
        before = ends[-1]
        for name in sorted(gradients, key=gradients.__getitem__):
            backward.setdefault(name, []).append(max(0.0, gradients[name] - before))
            before = gradients[name]
    return {
        name: (statistics.median(seconds), statistics.median(backward.get(name, [0.0])))
        for name, seconds in forward.items()
    }


def measurable(model: torch.nn.Module | None, steps: int, batch_size: int) -> torch.nn.Module:
    """Check that there is a `model` to measure, and return it.

    Raises ``ValueError`` for counts below 1, and where there is no model.
    """
    if steps < 1 or batch_size < 1:
        raise ValueError(f"steps and batch_size should be at least 1 and are {steps} and {batch_size}")
    if model is None:
        raise ValueError("save_profile() measures the layers of a module: give it to DistributedOptimizer")
    return model


class ProfileWriter:
    """A hook after each step: measures `steps` of them after one that warms up, then writes the profile and is gone."""

    def __init__(self, model: torch.nn.Module, path: Path, steps: int, batch_size: int) -> None:
        self._model, self._path, self._steps, self._batch_size = model, path, steps, batch_size
        self._times = LayerTimes(model)
        self._laps: list[_Lap] = []
        self._warm = False
        self.handle: RemovableHandle | None = None

    def __call__(self, *_: Any) -> None:
        lap = self._times.lap()
        if self._warm:
            self._laps.append(lap)
        self._warm = True
        if len(self._laps) < self._steps:
            return
        self._times.remove()
        if self.handle is not None:
            self.handle.remove()
        sizes = self._times.tensors
        layers = tuple(Layer(name, *seconds, sizes[name]) for name, seconds in durations(self._laps).items())
        source = f"measured in {self._steps} steps of training, torch {torch.__version__}"
        device = f"{platform.machine()} cpu, {torch.get_num_threads()} thread(s)"
        text = to_text(Profile(type(self._model).__name__, device, self._batch_size, source, layers))
        part = self._path.with_name(f"{self._path.name}.part")
        part.write_text(text)
        os.replace(part, self._path)
