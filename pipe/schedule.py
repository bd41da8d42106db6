"""Which stage works on which micro-batch when (pure).

    tick      0    1    2    3    4          GPipe (Huang et al., 2019), 3 stages, 3 micro-batches
    stage 0   0    1    2
    stage 1        0    1    2
    stage 2             0    1    2

Of m + n - 1 ticks of n stages, each stage works in m: the rest, (n - 1) / (m + n - 1) of the time, is the bubble. Where
each of n ranks has v stages, dealt round, a tick is v times as short, and a rank works in v m of v m + n - 1 (Narayanan et
al., 2021).
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["bubble", "stand_in", "ticks"]


def ticks(micro_batches: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    """For each tick, the pairs of micro-batch and stage that are worked on: independent of one another."""
    for tick in range(micro_batches + stages - 1):
        first, last = max(0, tick - micro_batches + 1), min(stages - 1, tick)
        yield [(tick - stage, stage) for stage in range(first, last + 1)]


def bubble(micro_batches: int, ranks: int, each: int = 1) -> float:
    """The share of a step in which a rank that has `each` so many stages waits, if all stages take equally long."""
    return (ranks - 1) / (each * micro_batches + ranks - 1)


def stand_in(schedule: str, micro_batches: int, ranks: int) -> str:
    """`schedule`, or the one in its place where it cannot have so many micro-batches along so many ranks.

    1F1B has a micro-batch for each stage at least. Interleaved 1F1B goes round in turns of equally many micro-batches, as
    many turns as there is a micro-batch for each rank in.
    """
    if schedule == "1f1b" and micro_batches < ranks:
        return "gpipe"
    if schedule == "interleaved1f1b" and micro_batches % max(1, micro_batches // ranks):
        return "loopedbfs"
    return schedule
