"""Measures the time that gates and hooks cost where they do nothing: torch's way to them, and back."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from overlap.core.gates.gates import Gates
from overlap.plan.measurement import Passing

__all__ = ["passing_cost"]

_CALLS = 32  # of each kind in a row …
_ROWS = 4  # … of which the quickest row counts


class _Probe(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _ignore(*_: object) -> None:
    """A gate that has nothing to await."""


def _quickest(call: Callable[[], object]) -> float:
    """Processor seconds of this thread: what others do on its core does not count."""
    took = []
    for _ in range(_ROWS):
        begun = time.thread_time()
        for _ in range(_CALLS):
            call()
        took.append(time.thread_time() - begun)
    return min(took) / _CALLS


def _costs(probe: _Probe) -> tuple[float, float, float]:
    x = torch.zeros(1)

    def backward() -> None:
        probe.weight.sum().backward()  # type: ignore[no-untyped-call]

    return _quickest(lambda: probe(x)), _quickest(lambda: probe.weight), _quickest(backward)


@torch.enable_grad()  # type: ignore[misc]  # torch's decorator has no types
def passing_cost() -> Passing:
    """Measure that time on this rank, in a few milliseconds."""
    plain, gated = _Probe(), _Probe()
    gates = Gates(_ignore, _ignore, _ignore)
    gates.guard([gated], lambda _: True)
    gated.weight.register_post_accumulate_grad_hook(_ignore)
    before, after = _costs(plain), _costs(gated)
    gates.remove()
    module, parameter, gradient = (max(0.0, more - less) for more, less in zip(after, before, strict=True))
    return Passing(module, parameter, max(0.0, gradient - parameter))
