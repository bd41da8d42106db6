"""Measures when each gradient of the user's own model is complete, during training or beside it.

Both ways take a stamp in a hook on every parameter; hooks are removed when the measurement is over. On a GPU, which
computes after the host has launched, stamps are events of the stream that computes the gradient.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy
import torch
from torch.utils.hooks import RemovableHandle

from overlap.core.gates.gates import GatedParameters
from overlap.transport.cuda.stamps import DeviceStamps
from overlap.transport.stamps import Stamp, Stamps

__all__ = ["BackwardClock", "arrival_moments", "backward_seconds", "profile_backward"]


class BackwardClock:
    """Stamps the moment at which each parameter's gradient arrives; the last arrival of a window counts."""

    def __init__(self, params: Sequence[torch.nn.Parameter], stamps: Stamps) -> None:
        self._stamps, self._lap = stamps, dict[int, Stamp]()
        self._handles: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(self._hook(index))
            for index, param in enumerate(params)
            if param.requires_grad
        ]

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def stamp(_param: torch.Tensor) -> None:
            self._lap[index] = self._stamps.now()

        return stamp

    def lap(self) -> dict[int, Stamp]:
        """The stamps since the last lap, by position of the parameter."""
        lap, self._lap = self._lap, {}
        return lap

    def seconds(self, laps: Sequence[Mapping[int, Stamp]]) -> list[dict[int, float]]:
        """The stamps of `laps` in seconds of the host's clock. A host that launches waits for its device."""
        read = self._stamps.reader()
        return [{index: read(stamp) for index, stamp in lap.items()} for lap in laps]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _stamps_for(params: Sequence[torch.nn.Parameter]) -> Stamps:
    """For the device that computes gradients of `params`."""
    devices = (param.device for param in params if param.is_cuda)
    device = next(devices, None)
    return Stamps() if device is None else DeviceStamps(device, on_streams=True)


def backward_seconds(order: Sequence[int], laps: Sequence[Mapping[int, float]]) -> tuple[float, ...]:
    """Backward time between each gradient of `order` and the one before it, the median over `laps`. Pure.

    The first one counts from the lap's own beginning if the lap has it, under key -1, and is 0 otherwise. A gradient
    that comes before its predecessor in `order` cannot be sent before it either, so it counts as arriving with it.
    One that never came counts as arriving with the last.
    """
    arrivals: list[float] = []
    for index in order:
        relative = [lap[index] - lap.get(-1, lap.get(order[0], min(lap.values()))) for lap in laps if index in lap]
        arrivals.append(statistics.median(relative) if relative else max(arrivals, default=0.0))
    seconds, now = [], 0.0
    for arrival in arrivals:
        later = max(now, arrival)
        seconds.append(later - now)
        now = later
    return tuple(seconds)


def arrival_moments(laps: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Seconds from the first gradient of a backward pass to each one, the median over `laps`. Pure."""
    relative: dict[int, list[float]] = {}
    for lap in laps:
        first = min(lap.values(), default=0.0)
        for index, stamp in lap.items():
            relative.setdefault(index, []).append(stamp - first)
    return {index: statistics.median(values) for index, values in relative.items()}


def profile_backward(
    model: torch.nn.Module, compute_loss: Callable[[], torch.Tensor], *, warmup: int = 3, iterations: int = 10
) -> dict[str, float]:
    """Measure the backward pass of `model` beside training. On this rank alone; nothing is communicated.

    Args:
        model: not wrapped by a distributed optimizer yet.
        compute_loss: runs the forward on a fixed batch and returns the loss; called ``warmup + iterations`` times.
        warmup: passes that are not counted.
        iterations: passes of which the median is taken.

    Returns seconds by parameter name, from the gradient before it to its own, in the order in which gradients arrived.
    Parameters without a gradient are left out. Afterwards gradients, buffers (batch-norm statistics) and the random
    state of torch, numpy and Python are what they were, and no hook is left.

    Raises ``ValueError`` for counts below 1 or a loss without any gradient, ``RuntimeError`` for a wrapped model.
    """
    if warmup < 0 or iterations < 1:
        raise ValueError(f"warmup should be at least 0 and iterations at least 1; they are {warmup} and {iterations}")
    if any(isinstance(module._parameters, GatedParameters) for module in model.modules()):
        raise RuntimeError("profile the model before its optimizer is wrapped: its gradients would be sent otherwise")
    names, params = list(dict(model.named_parameters())), list(model.parameters())
    laps: list[dict[int, Stamp]] = []
    stamps = _stamps_for(params)
    clock = BackwardClock(params, stamps)
    try:
        with _restored(model, params):
            for number in range(warmup + iterations):
                for param in params:
                    param.grad = None
                loss = compute_loss()
                begin = stamps.now()
                loss.backward()
                lap = clock.lap()
                if number >= warmup:
                    laps.append({-1: begin, **lap})
    finally:
        clock.remove()
    times = clock.seconds(laps)
    order = sorted((index for index in times[-1] if index >= 0), key=times[-1].__getitem__)
    if not order:
        raise ValueError("the loss reaches no parameter of the model: there is no backward to measure")
    return {names[index]: value for index, value in zip(order, backward_seconds(order, times), strict=True)}


@contextmanager
def _restored(model: torch.nn.Module, params: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Put gradients, buffers (those that a forward replaces by new tensors too) and random states back."""
    gradients = [param.grad for param in params]
    registered = [(module, dict(module._buffers)) for module in model.modules()]
    values = {id(buffer): (buffer, buffer.detach().clone()) for buffer in model.buffers()}
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        for module, buffers in registered:
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values.values():
                buffer.copy_(value)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
