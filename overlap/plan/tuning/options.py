"""The options of a tuning: how long and how widely to search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Tuning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The options of ``tune=Tuning(...)``; ``tune=True`` is ``Tuning()``.

    Raises ``ValueError`` for numbers without sense.
    """

    trials: int = 20
    """Settings that are measured at most, the one in force at the start included."""

    warmup: int = 3
    """Steps after a change that are not counted."""

    window: int = 10
    """Steps whose median time is a setting's score."""

    pairs: int = 3
    """How often the setting of the start and the best one are measured against each other at the end."""

    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Bounds by dimension (``{"threshold_mb": (1, 64)}``) where the strategy's own do not suit."""

    path: str | Path | None = None
    """A JSON file, read and written by rank 0: a result for this model, these ranks and this network is used instead of
    a search, and a search leaves its result there."""

    seed: int = 0
    """Of the search's own random numbers."""

    def __post_init__(self) -> None:
        for name, least in (("trials", 2), ("warmup", 0), ("window", 1), ("pairs", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} should be a whole number of at least {least} and is {value!r}")
