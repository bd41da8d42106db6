"""Ratios in words, as sentences say them (pure)."""

from __future__ import annotations

import math

__all__ = ["spoken"]

_PARTS = ("third", "quarter", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_TIMES = ("three", "four", "five", "six", "seven", "eight", "nine", "ten")
_WORDS = {
    **{1 / number: f"a {part}" for number, part in enumerate(_PARTS, 3)},
    **{float(number): f"{word} times" for number, word in enumerate(_TIMES, 3)},
    1 / 2: "half",
    2 / 3: "two thirds",
    3 / 4: "three quarters",
    3 / 2: "one and a half times",
    2.0: "twice",
}
_NEAR = 0.1


def spoken(value: float) -> str:
    """The words for a ratio. Raises ``ValueError`` where none is within 10 % of it."""
    nearest = min(_WORDS, key=lambda known: abs(math.log(value / known))) if value > 0 else math.inf
    if abs(value / nearest - 1) > _NEAR:
        raise ValueError(f"{value:.2f} has no words, which are for a tenth to ten times; say the number")
    return _WORDS[nearest]
