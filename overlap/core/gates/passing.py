"""Measures the time that gates and hooks cost where they do nothing: torch's way to them, and back."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from overlap.core.gates.gates import Gates
from overlap.plan.measurement import Passing

__all__ = ["passing_cost"]

_CALLS = 16  # of each kind in a row …
_ROWS = 16  # … of which the quickest row counts


class _Probe(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _ignore(*_: object) -> None:
    """A gate that has nothing to await."""


def _row(call: Callable[[], object]) -> float:
    """Processor seconds of this thread: what others do on its core does not count."""
    begun = time.thread_time()
    for _ in range(_CALLS):
        call()
    return time.thread_time() - begun


def _difference(plain: Callable[[], object], gated: Callable[[], object]) -> float:
    """Seconds that a gated call takes longer: rows in turn, since the pace of a shared core changes within milliseconds."""
    rows = [(_row(plain), _row(gated)) for _ in range(_ROWS)]
    less, more = map(min, zip(*rows, strict=True))
    return max(0.0, more - less) / _CALLS


def _backward(probe: _Probe) -> Callable[[], None]:
    return lambda: probe.weight.sum().backward()  # type: ignore[no-untyped-call]


@torch.enable_grad()  # type: ignore[misc]  # torch's decorator has no types
def passing_cost() -> Passing:
    """Measure that time on this rank, in some ten milliseconds."""
    plain, gated = _Probe(), _Probe()
    gates = Gates(_ignore, _ignore, _ignore)
    gates.guard([gated], lambda _: True)
    gated.weight.register_post_accumulate_grad_hook(_ignore)
    x = torch.zeros(1)
    module = _difference(lambda: plain(x), lambda: gated(x))
    parameter = _difference(lambda: plain.weight, lambda: gated.weight)
    gradient = _difference(_backward(plain), _backward(gated))
    gates.remove()
    return Passing(module, parameter, max(0.0, gradient - parameter))
