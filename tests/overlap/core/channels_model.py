"""Channels and ranks of a model: ranks are generators that yield what they wait for.

Who goes on is drawn from a seed: whatever goes wrong does so again, and ranks that wait for each other are found at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

from overlap.core.tally import Heard, Said

T = TypeVar("T")
H = TypeVar("H", bound=Heard)
Waits = Generator[Callable[[], bool], None, T]


class Deadlock(Exception):
    pass


class Channel:
    """Operation k of every rank belongs together; `what` it is has to be the same on all of them."""

    def __init__(self, name: str, ranks: Iterable[int]) -> None:
        self.name, self.ranks = name, tuple(ranks)
        self.operations: list[tuple[object, dict[int, Any]]] = []
        self._next = dict.fromkeys(self.ranks, 0)

    def post(self, rank: int, what: object, value: object = None) -> int:
        number = self._next[rank]
        self._next[rank] += 1
        if number == len(self.operations):
            self.operations.append((what, {}))
        first, values = self.operations[number]
        assert what == first, f"{self.name}: operation {number} is {what} on rank {rank}, and {first} elsewhere"
        values[rank] = value
        return number

    def done(self, number: int) -> bool:
        return len(self.operations[number][1]) == len(self.ranks)

    def read(self, number: int) -> Waits[dict[int, Any]]:
        if not self.done(number):
            yield lambda: self.done(number)
        return self.operations[number][1]

    def exchange(self, rank: int, what: object, value: object = None) -> Waits[dict[int, Any]]:
        return (yield from self.read(self.post(rank, what, value)))

    @property
    def even(self) -> bool:
        return len(set(self._next.values())) == 1


def heard_of(said: Iterable[Said], heard_type: type[H]) -> H:
    """What ranks hear when each has said its part."""
    return heard_type.of([max(column) for column in zip(*(one.numbers() for one in said), strict=True)])


def always() -> bool:
    return True


def run(ranks: dict[int, Waits[None]], script: random.Random) -> None:
    """All of them to their ends, in an order drawn from `script`. Raises :class:`Deadlock`."""
    slow = {rank: script.choice((1.0, 1.0, 0.3, 0.03)) for rank in ranks}
    waits: dict[int, Callable[[], bool]] = dict.fromkeys(ranks, always)
    while waits:
        ready = [rank for rank, ripe in waits.items() if ripe()]
        if not ready:
            raise Deadlock(f"ranks {sorted(waits)} wait for each other")
        (rank,) = script.choices(ready, [slow[rank] for rank in ready])
        try:
            waits[rank] = next(ranks[rank])
        except StopIteration:
            del waits[rank]
