"""What ranks that join are told, whom a rank in join() waits for, and how it hears that others are lost."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from comm_core import TransportError
from overlap.features.join import JoinedRanks, News, Word


class _Queries:
    """Everybody answers that nothing was said. `heard` has what others send, by topic."""

    def __init__(self) -> None:
        self.heard: dict[str, Callable[[int, Any], Any]] = {}

    def on(self, topic: str, handler: Any) -> None:
        self.heard[topic] = handler

    def ask(self, rank: int, topic: str, question: Any) -> Future[Any]:
        receipt: Future[Any] = Future()
        receipt.set_result([])
        return receipt


def _in_time() -> Callable[[], None]:
    """Raises where a rank waits on; what is heard is there already."""
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        assert len(looks) < 10, "it waits for somebody who has come"

    return look


def _joined(size: int, heed: Callable[[], None] = lambda: None) -> tuple[JoinedRanks, Callable[..., Any]]:
    """Those of rank 0, and what it makes of a rank's news: that it has joined, in a generation."""
    comm: Any = SimpleNamespace(rank=0, size=size)
    queries: Any = _Queries()
    joined = JoinedRanks(comm, queries, left=list, heed=heed)

    def hear(rank: int, generation: int = 0, **rounds: int) -> Any:
        return queries.heard["join/joined"](rank, News(generation, rounds, {}, {topic: [] for topic in rounds}))

    return joined, hear


class _Optimizer:
    topic = "one"

    def __init__(self, ranks: Collection[int]) -> None:
        self.ranks = ranks


@pytest.mark.parametrize(("since", "told"), [(1, ["first", "second"]), (2, ["second"])])
def test_who_joins_is_told_what_was_said_in_the_rounds_that_it_has_no_part_in(since: int, told: list[str]) -> None:
    """Others may be one round ahead of it, and no more."""
    joined, hear = _joined(2)
    optimizer: Any = _Optimizer([0, 1])
    joined.enroll(optimizer)
    for round, what in enumerate(["before", "first", "second"]):
        joined.say(Word("one", round, 0, what, {}), optimizer.ranks, keep=True)
        joined.closed("one", round)
    assert [word.what for word in hear(1, one=since)] == told


@pytest.mark.timeout(60)
def test_when_all_have_joined_nobody_is_away() -> None:
    """But for who has joined again since."""
    joined, hear = _joined(3, _in_time())
    hear(1)
    hear(2)
    assert joined.away == {1, 2}
    assert joined.joined_now == [1, 2]
    joined.join()
    assert joined.away == set()
    hear(2, generation=1)
    assert joined.away == {2}
    assert joined.joined_now == [2]


@pytest.mark.timeout(60)
def test_who_joins_again_while_others_are_waited_for_need_not_come_a_third_time() -> None:
    joined, hear = _joined(3, _in_time())
    hear(1)
    hear(1, generation=1)
    hear(2)
    joined.join()
    assert joined.away == {1}
    hear(2, generation=1)
    joined.join()
    assert joined.away == set()


@pytest.mark.timeout(30)
def test_who_waits_for_others_hears_that_they_are_lost() -> None:
    looked = []

    def heed() -> None:
        looked.append(1)
        if len(looked) == 2:
            raise TransportError("rank(s) [1] of 2 are lost")

    comm: Any = SimpleNamespace(rank=0, size=2)
    queries: Any = _Queries()
    joined = JoinedRanks(comm, queries, left=list, heed=heed)
    with pytest.raises(TransportError, match="are lost"):
        joined.join()
    assert joined.failed_here
    assert not joined.following
