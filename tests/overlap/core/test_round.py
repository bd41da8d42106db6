"""Which reductions a step takes before it waits, and what a round's gradients may become."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from overlap.core.bucket import Phase
from overlap.core.round import Round, Stage


def _bucket(phase: Phase, done: bool | None) -> Any:
    bucket = SimpleNamespace(phase=phase, meets=True, work=None if done is None else SimpleNamespace(done=lambda: done))
    bucket.advance = lambda to: setattr(bucket, "phase", to)
    return bucket


def _round(order: list[Any], monkeypatch: pytest.MonkeyPatch, away: tuple[int, ...] = ()) -> tuple[Round, list[Any]]:
    settled: list[Any] = []
    planner: Any = SimpleNamespace(slots=[], order=order, shards=None)
    nothing: Any = SimpleNamespace()
    others: Any = SimpleNamespace(away=away)
    round = Round(planner, [], nothing, nothing, others, (), passes=1, hold_last=True, ordered=True, deferred=False)
    monkeypatch.setattr(round, "reduced", settled.append)
    return round, settled


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([(Phase.REDUCING, True), (Phase.REDUCING, True), (Phase.REDUCING, False)], [0, 1]),
        ([(Phase.REDUCING, True), (Phase.REDUCING, False), (Phase.REDUCING, True)], [0]),
        ([(Phase.GATHERING, None), (Phase.REDUCED, None), (Phase.REDUCING, True)], [2]),  # some were updated early
        ([(Phase.REDUCING, None), (Phase.REDUCING, True)], []),  # nothing on the wire that could be asked
    ],
)
def test_only_what_is_reduced_is_settled_in_order_of_issue(
    states: list[tuple[Phase, bool | None]], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = [_bucket(*state) for state in states]
    round, settled = _round(order, monkeypatch)
    round.settle_done()
    assert [order.index(bucket) for bucket in settled] == expected
    assert [order[number].phase for number in expected] == [Phase.REDUCED] * len(expected)


def test_nothing_is_settled_early_where_a_rank_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it could is known when all ranks have said their part."""
    round, settled = _round([_bucket(Phase.REDUCING, True)], monkeypatch, away=(1,))
    round.settle_done()
    assert not settled


def test_averages_do_not_become_local_again_before_the_round_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    round, _ = _round([], monkeypatch)
    with pytest.raises(RuntimeError, match="LOCAL cannot become SHOWN"):
        round.advance(Stage.SHOWN)
    round.advance(Stage.SETTLED)
    round.advance(Stage.SYNCHRONIZED)
    with pytest.raises(RuntimeError, match="SYNCHRONIZED cannot become SETTLED"):
        round.advance(Stage.SETTLED)
    round.reset()
    assert round.stage is Stage.LOCAL
