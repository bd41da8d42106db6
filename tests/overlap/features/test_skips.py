"""What becomes of a step that only some ranks skip, without any other rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from overlap.features import skips
from overlap.features.skips import Skips
from overlap.health.stacks import Place

CONFLICT = r"rank 1 has dropped the gradients of step 3 \(zero_grad\(\) before step\(\)\), and rank 0 has stepped"


class _Queries:
    def __init__(self) -> None:
        self.handlers: dict[str, Callable[[int, Any], Any]] = {}
        self.told: list[tuple[int, str, Any]] = []
        self.busy: bool | None = None  # whether the other rank has gradients to drop; None: it never answers

    def on(self, topic: str, handler: Callable[[int, Any], Any]) -> None:
        self.handlers[topic] = handler

    def tell(self, rank: int, topic: str, payload: Any) -> None:
        self.told.append((rank, topic, payload))
        if topic == "state/1/skips" and self.busy is not None:  # the other rank has come to the same call
            self.handlers["state/1/skips/answer"](rank, (payload, self.busy))


def _skips(abort: Callable[[int], None] = lambda _status: None) -> tuple[Skips, _Queries, Any]:
    attendance = SimpleNamespace(topic="state/1", round=3, ranks=(0, 1), present=lambda _round: (0, 1))
    peer_queries = _Queries()
    return Skips(0, attendance, peer_queries, abort), peer_queries, attendance  # type: ignore[arg-type]


@pytest.mark.parametrize("busy", [True, False])
def test_a_rank_without_gradients_asks_the_others_before_it_goes_on(busy: bool) -> None:
    mine, peer_queries, _ = _skips()
    peer_queries.busy = busy
    mine.passed = True  # a forward ran, and its backward before a step
    assert not mine.meet(dropping=False)
    assert peer_queries.told == []
    mine.passed = True  # another one, and no step
    assert mine.meet(dropping=False) is busy
    dropped = [(1, "state/1/skips/dropped", 3)] if busy else []
    assert not mine.meet(dropping=False)  # no forward since
    assert peer_queries.told == [(1, "state/1/skips", (3, 2)), *dropped]


def test_without_a_forward_nobody_is_asked() -> None:
    mine, peer_queries, _ = _skips()
    peer_queries.busy = True
    for _ in range(3):
        assert not mine.meet(dropping=False)
    mine.passed = True
    assert mine.meet(dropping=True)  # this one knows
    assert peer_queries.told == [(1, "state/1/skips/dropped", 3)]


def test_a_step_that_another_rank_is_known_to_have_dropped_raises() -> None:
    mine, peer_queries, _ = _skips()
    peer_queries.handlers["state/1/skips/dropped"](1, 3)
    mine.step()  # by synchronize(), say: zero_grad() may follow
    with pytest.raises(RuntimeError, match=CONFLICT):
        mine.stepped()
    assert [(rank, topic) for rank, topic, _ in peer_queries.told] == [(1, "state/1/skips/apart")]


def test_a_step_that_another_rank_turns_out_to_have_dropped_raises_in_the_next_call() -> None:
    mine, peer_queries, attendance = _skips()
    mine.stepped()
    attendance.round = 4
    peer_queries.handlers["state/1/skips/dropped"](1, 3)
    with pytest.raises(RuntimeError, match=CONFLICT):
        mine.meet(dropping=False)


def test_who_dropped_alone_is_told_and_raises_too() -> None:
    mine, peer_queries, _ = _skips()
    assert mine.meet(dropping=True)
    assert peer_queries.told == [(1, "state/1/skips/dropped", 3)]
    peer_queries.handlers["state/1/skips/dropped"](1, 3)  # so has the other one: nothing is wrong
    mine.step()
    peer_queries.handlers["state/1/skips/apart"](1, "what went apart")
    with pytest.raises(RuntimeError, match="what went apart"):
        mine.step()


def test_who_waits_for_what_never_comes_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = [{Place.OUTSIDE}, {Place.OUTSIDE}]  # and inside, from then on
    monkeypatch.setattr(skips, "_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(skips, "places", lambda _threads: found.pop() if found else {Place.INSIDE})
    ended = threading.Event()
    mine, peer_queries, _ = _skips(lambda _status: ended.set())
    mine.stepped()
    peer_queries.handlers["state/1/skips/dropped"](1, 3)
    assert ended.wait(10)
    assert not found
    assert "aborting the job" in caplog.text
