"""Times a training step and its parts."""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.methods.method import MakeOptimizer

__all__ = ["Breakdown", "Clock", "alone", "breakdown", "step", "warm_up"]

LossOf = Callable[[nn.Module], torch.Tensor]
_STEPS_ALONE = 3


class Clock:
    """Seconds of steps and of their phases, and of blocks at whose end the device has caught up.

    On a GPU they are between events of its stream: the host's time is that of launches. They are known once it has
    :meth:`settled`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_device = device.type == "cuda"
        self._marked: list[list[Any]] = []
        self.steps: list[float] = []
        self.phases: dict[str, list[float]] = {"forward": [], "backward": [], "step": []}

    def mark(self) -> Any:
        """The current time, as the host or the device sees it."""
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def note(self, begun: Any, forward: Any, backward: Any, stepped: Any, ended: Any) -> None:
        """Record the marks of one step: its begin, the end of each phase, and its end."""
        self._marked.append([begun, forward, backward, stepped, ended])
        if not self._on_device:
            self._read()

    def settled(self) -> float:
        """The time once the device has nothing left to do."""
        if self._on_device:
            torch.cuda.synchronize(self._device)
            self._read()
        return time.perf_counter()

    def _read(self) -> None:
        for marks in self._marked:
            self.steps.append(self._between(marks[0], marks[-1]))
            for seconds, (since, until) in zip(self.phases.values(), itertools.pairwise(marks[:-1]), strict=True):
                seconds.append(self._between(since, until))
        self._marked.clear()

    def _between(self, since: Any, until: Any) -> float:
        return since.elapsed_time(until) / 1e3 if self._on_device else until - since

    def medians(self) -> dict[str, float]:
        return {phase: statistics.median(values) for phase, values in self.phases.items()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: LossOf, clock: Clock) -> None:
    """Run one step: forward, backward, the optimizer's step."""
    begun = clock.mark()
    loss = loss_of(model)
    forward = clock.mark()
    loss.backward()  # type: ignore[no-untyped-call]
    backward = clock.mark()
    optimizer.step()
    stepped = clock.mark()
    optimizer.zero_grad()
    clock.note(begun, forward, backward, stepped, clock.mark())


def warm_up(count: int, tuning: Callable[[], bool], once: Callable[[], object]) -> int:
    """Run at least `count` steps, the last one with the method's final setting; returns their number.

    A method that searches while it trains would be timed in the middle of its search otherwise. `tuning` gives the same
    on every rank, so all take the same steps.
    """
    steps, settled = 0, False
    while steps < count or not settled:
        settled = not tuning()  # before the step, which is the first one with a new plan
        once()
        steps += 1
    return steps


def alone(model: nn.Module, make: MakeOptimizer, loss_of: LossOf, device: torch.device) -> dict[str, float]:
    """Median seconds of each phase without communication, after one step that is not counted.

    To be called before a method gets the model, which is left as it was.
    """
    saved = copy.deepcopy(model.state_dict())
    build, arguments = make
    optimizer = build(model.parameters(), **arguments)
    step(model, optimizer, loss_of, Clock(device))
    clock = Clock(device)
    for _ in range(_STEPS_ALONE):
        step(model, optimizer, loss_of, clock)
        clock.settled()
    model.load_state_dict(saved)
    return clock.medians()


@dataclass(frozen=True)
class Breakdown:
    """The seconds of a step: computation as it is without communication, and what communication adds to it."""

    forward: float
    backward: float
    update: float
    exposed: float

    def __str__(self) -> str:
        parts = {"forward": self.forward, "backward": self.backward, "update": self.update}
        parts["exposed communication"] = self.exposed
        return ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in parts.items())


def breakdown(phases: Mapping[str, float], median_step: float) -> Breakdown:
    """Split a step's time; where updates are sharded, what they save counts against exposed communication."""
    return Breakdown(phases["forward"], phases["backward"], phases["step"], median_step - sum(phases.values()))
