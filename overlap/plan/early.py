"""Chooses which buckets are updated before ``step()``, and how many, for `overlap.features.early`. Pure."""

from __future__ import annotations

__all__ = ["next_count", "spread"]


def spread(candidates: int, count: int) -> list[int]:
    """`count` of `candidates` places, evenly from the first one on: [Note: early updates are spread]."""
    return [number * candidates // count for number in range(count)]


def next_count(planned: int, possible: int, candidates: int) -> int:
    """The number of buckets to update early, after a step for which so many were planned and all could do `possible`.

    An eighth of what was too much is dropped at a time, at least one: that a step was slow says little.
    """
    return min(possible, candidates) if possible >= planned else planned - max(1, (planned - possible) // 8)
