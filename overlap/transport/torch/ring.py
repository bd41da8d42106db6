"""The order in which segments travel around a ring, as pure functions of rank, size and counts.

    reduce-scatter, 4 ranks, rank 0       hop 0        hop 1        hop 2
      receives from rank 3                shard 2      shard 1      shard 0, complete
      sends to rank 1                     shard 3      shard 2      shard 1

A shard starts at the rank after its owner and arrives at the owner with everybody's part in it. The all-gather runs the
same ring the other way round in meaning: every rank starts its own shard, which ends one rank before its owner.
Shards travel in segments, so that all links are busy as soon as the first segments have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

__all__: list[str] = []


@dataclass(frozen=True)
class Span:
    """Elements `start` to `stop` of the flat buffer that all shards together make up."""

    start: int
    stop: int


@dataclass(frozen=True)
class Arrival:
    """A span that comes from the previous rank; `forward` when it goes on to the next one."""

    span: Span
    forward: bool


def shard_spans(counts: Sequence[int]) -> list[Span]:
    """The span of each rank's shard."""
    stops = list(accumulate(counts))
    return [Span(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


def segments(span: Span, limit: int) -> list[Span]:
    """`span` in order, in the fewest parts of at most `limit` elements, as even as possible; none when it is empty."""
    length = span.stop - span.start
    if length <= 0:
        return []
    parts = -(-length // limit)
    edges = [span.start + length * i // parts for i in range(parts + 1)]
    return [Span(start, stop) for start, stop in pairwise(edges)]


def reduce_scatter_ring(rank: int, counts: Sequence[int], limit: int) -> tuple[list[Span], list[Arrival]]:
    """The shard that a rank sends first, and what then arrives, in order; the last arrival is its own shard."""
    size, shards = len(counts), shard_spans(counts)
    first = segments(shards[(rank - 1) % size], limit) if size > 1 else []
    return first, _arrivals(shards, [(rank - 2 - hop) % size for hop in range(size - 1)], limit)


def all_gather_ring(rank: int, counts: Sequence[int], limit: int) -> tuple[list[Span], list[Arrival]]:
    """As `reduce_scatter_ring`, with the rank's own shard sent first."""
    size, shards = len(counts), shard_spans(counts)
    first = segments(shards[rank], limit) if size > 1 else []
    return first, _arrivals(shards, [(rank - 1 - hop) % size for hop in range(size - 1)], limit)


def broadcast_chain(rank: int, size: int, root: int, count: int, limit: int) -> tuple[list[Span], list[Arrival]]:
    """The arrivals of a broadcast's chain: the root sends everything, every other rank but the last passes it on.

    The same ring, with one hop of everything for everybody but the root.
    """
    whole = segments(Span(0, count), limit) if size > 1 else []
    if rank == root:
        return whole, []
    return [], [Arrival(span, forward=(rank + 1) % size != root) for span in whole]


def _arrivals(shards: Sequence[Span], order: Sequence[int], limit: int) -> list[Arrival]:
    last = len(order) - 1
    return [
        Arrival(segment, forward=hop < last)
        for hop, shard in enumerate(order)
        for segment in segments(shards[shard], limit)
    ]
