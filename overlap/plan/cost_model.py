"""What an all-reduce costs: a start-up time and a time for each byte, fitted to measurements (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CostModel", "fit"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost of an all-reduce: ``alpha + beta * nbytes`` seconds, nothing for no bytes (Shi et al., INFOCOM 2019).

    Two transfers cost exactly `alpha` more than one transfer of both: that is what merging saves on the wire. It saves
    `handling` besides, in which the thread that computes does nothing else.
    Raises ``ValueError`` for numbers that no network can have.
    """

    alpha: float  # seconds
    beta: float  # seconds per byte
    handling: float = 0.0  # seconds of the calling thread to issue one operation and to take its end, whatever its size

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("beta", self.beta), ("handling", self.handling)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} should be at least 0 and finite and is {value}")

    def seconds(self, nbytes: float) -> float:
        return self.alpha + self.beta * nbytes if nbytes else 0.0


def fit(samples: Sequence[tuple[int, float]]) -> CostModel:
    """Fit the model to measured (bytes, seconds), by least squares of *relative* errors.

    Small and large messages count alike; with absolute errors the largest ones alone would decide alpha. Neither
    parameter goes below 0: where the free fit would, it is 0 and the other is fitted alone. Raises ``ValueError`` for
    fewer than two sizes and for times that are not positive.
    """
    if len({nbytes for nbytes, _ in samples}) < 2:
        raise ValueError(f"a fit needs at least two sizes and got {sorted({nbytes for nbytes, _ in samples})}")
    wrong = [(nbytes, seconds) for nbytes, seconds in samples if not (seconds > 0 and nbytes > 0)]
    if wrong:
        raise ValueError(f"sizes and times should be above 0; (bytes, seconds) is {wrong[0]}")
    # Minimise the sum of (alpha/t + beta*m/t - 1)^2 over alpha and beta: the normal equations of two unknowns.
    rows = [(1 / seconds, nbytes / seconds) for nbytes, seconds in samples]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = aa * bb - ab * ab
    alpha, beta = (a1 * bb - b1 * ab) / determinant, (aa * b1 - ab * a1) / determinant
    if alpha < 0:
        return CostModel(0.0, b1 / bb)
    if beta < 0:
        return CostModel(a1 / aa, 0.0)
    return CostModel(alpha, beta)
