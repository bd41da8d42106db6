"""Models of what collectives cost on networks: rings, within hosts and between them. Pure.

Rings move every byte as seldom as can be: a reduce-scatter or an all-gather over P ranks takes P - 1 turns of a P-th of
the bytes each (Patarasuk and Yuan, 2009); an all-reduce is one of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from overlap.plan.simulation.events import Cost

__all__ = ["Fitted", "Link", "Medium", "Network", "filled"]


class Medium(Protocol):
    """The interface of a network: the costs of collectives of so many bytes."""

    @property
    def workers(self) -> int: ...

    def reduce_scatter(self, nbytes: float, /) -> Cost: ...

    def all_gather(self, nbytes: float, /) -> Cost: ...

    def all_reduce(self, nbytes: float, /) -> Cost: ...


@dataclass(frozen=True, slots=True)
class Link:
    """A link: `alpha` seconds for a message, besides its bytes. `beta`: seconds per byte.

    Raises ``ValueError`` for numbers that no network can have.
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} should be at least 0 and finite and is {value}")

    @classmethod
    def of_gbit(cls, gbit: float, alpha: float, share: float = 1.0) -> Link:
        """A link of `gbit` Gbit/s, of which a `share` from 0 to 1 carries payload."""
        return cls(alpha, 8e-9 / (gbit * share))


@dataclass(frozen=True, slots=True)
class Network:
    """A network of `workers` ranks on hosts of `per_host`, with links `between` hosts and `within` one.

    The ranks of a host share its link.

    One ring goes through all ranks, host by host, as ours and NCCL's do. Its slowest link is the pace of bytes. A rank
    waits for its neighbour only, so a piece takes the links' starts one after the other.

    Raises ``ValueError`` where the workers do not fill their hosts.
    """

    workers: int
    between: Link
    per_host: int = 1
    within: Link = Link(0.0, 0.0)

    def __post_init__(self) -> None:
        if self.workers < 1 or self.per_host < 1 or self.workers % self.per_host:
            raise ValueError(f"{self.workers} workers do not fill hosts of {self.per_host}: take a multiple")

    @property
    def hosts(self) -> int:
        return self.workers // self.per_host

    def half(self, nbytes: float) -> Cost:
        """The cost of a reduce-scatter or an all-gather of `nbytes` in all."""
        if self.workers == 1 or not nbytes:
            return Cost(0.0, 0.0)
        if self.hosts == 1:
            return _ring(self.within, self.workers, nbytes)
        if self.per_host == 1:
            return _ring(self.between, self.workers, nbytes)
        starts = self.hosts * self.between.alpha + (self.workers - self.hosts) * self.within.alpha
        starts -= min(self.between.alpha, self.within.alpha)  # a piece passes all links of the circle but one
        slowest = Link(0.0, max(self.between.beta, self.within.beta))
        return Cost(starts, _ring(slowest, self.workers, nbytes).transfer)

    def reduce_scatter(self, nbytes: float) -> Cost:
        return self.half(nbytes)

    def all_gather(self, nbytes: float) -> Cost:
        return self.half(nbytes)

    def all_reduce(self, nbytes: float) -> Cost:
        half = self.half(nbytes)
        return half + half


@dataclass(frozen=True, slots=True)
class Fitted:
    """A network as it was measured. `start`: seconds of a reduce-scatter or an all-gather whatever its size; `reduce` and
    `gather`: seconds per byte of each, which differ where one of them travels in 16 bits.
    """

    workers: int
    start: float
    reduce: float
    gather: float

    def reduce_scatter(self, nbytes: float) -> Cost:
        return Cost(self.start, self.reduce * nbytes)

    def all_gather(self, nbytes: float) -> Cost:
        return Cost(self.start, self.gather * nbytes)

    def all_reduce(self, nbytes: float) -> Cost:
        return self.reduce_scatter(nbytes) + Cost(self.start, self.reduce * nbytes)


def filled(shares: Sequence[float]) -> float:
    """How much of the links a half can use whose ranks own `shares` of the bytes: 1 where these are equal, else less.

    In a ring, each link carries all shares but one. Where they are equal, all links carry as much.
    """
    total = sum(shares)
    if len(shares) == 1 or not total:
        return 1.0
    return (len(shares) - 1) / len(shares) * total / (total - min(shares))


def _ring(link: Link, ranks: int, nbytes: float) -> Cost:
    return Cost((ranks - 1) * link.alpha, (ranks - 1) / ranks * nbytes * link.beta)
