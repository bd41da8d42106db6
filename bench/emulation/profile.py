"""Which profile an emulated accelerator follows: one of the library's, or layers that all take the same time (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from overlap.plan.simulation.profile import Profile
from overlap.plan.simulation.workload import Layer

__all__ = ["EVEN", "even", "parse_spec"]

EVEN = "even"


def parse_spec(spec: str) -> tuple[str, str, float | None]:
    """``"resnet50@a100:64"`` to ``("resnet50", "a100", 64.0)``; the number may be left out, except for ``even``."""
    model, at, rest = spec.partition("@")
    device, colon, number = rest.partition(":")
    if not (model and at and device):
        raise ValueError(
            f"an emulated accelerator is written MODEL@DEVICE[:BATCH], e.g. resnet50@a100:64, not {spec!r}"
        )
    try:
        value = float(number) if colon else None
    except ValueError:
        raise ValueError(f"after the colon of {spec!r} a number is expected, not {number!r}") from None
    if value is not None and not value > 0:
        raise ValueError(f"the number of {spec!r} should be above 0")
    if device == EVEN and value is None:
        raise ValueError(f"{model}@{EVEN} needs the milliseconds of a whole step, e.g. {model}@{EVEN}:640")
    return model, device, value


def even(model: str, names: Sequence[str], milliseconds: float) -> Profile:
    """Every layer takes the same time, a third of it in forward. How many bytes it has is not said."""
    each = milliseconds / 1e3 / len(names) / 3
    layers = tuple(Layer(name, each, 2 * each, ()) for name in names)
    return Profile(model, EVEN, 0, f"{milliseconds:g} ms spread evenly, forward : backward = 1 : 2", layers)
