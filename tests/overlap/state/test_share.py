"""A question for the state is answered from the step that it asks for, and from no other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import pytest
import torch

from overlap.state.pieces import PieceState
from overlap.state.share import OUTLINE, StateShare


class _Room:
    """Peer queries of a rank, without one: it is asked by the test."""

    def __init__(self) -> None:
        self._handler: Callable[[int, Any], PieceState]

    def on(self, _topic: str, handler: Callable[[int, Any], PieceState], *, waits: bool) -> None:
        assert waits, "for the steps of its script, whose letters may come behind the question"
        self._handler = handler

    def answer(self, asking: int, steps: int, which: int | None = None) -> PieceState:
        return self._handler(asking, (steps, which))

    def parameters(self, steps: int, slots: tuple[int, ...], loaded: tuple[int, ...]) -> PieceState:
        return self._handler(0, (steps, slots, loaded))


class _Rank:
    """Its state is the number of its steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.room = _Room()
        self.share = StateShare([], self.room)  # type: ignore[arg-type]
        self.share.serve("state", self._export)

    def _export(self, which: int | None) -> PieceState:
        return _state(self.steps) if which in (None, 0) else {}

    def step(self) -> None:
        with self.share.updating():
            self.steps += 1


def _state(steps: int) -> PieceState:
    return {0: (0, 1, {"step": steps})}


def _waits(answer: Future[Any]) -> bool:
    try:
        answer.result(timeout=0.01)
    except FutureTimeout:
        return True
    return False


def test_who_is_asked_before_its_step_answers_after_it() -> None:
    rank = _Rank()
    rank.step()
    with ThreadPoolExecutor(1) as peer_queries:
        answer = peer_queries.submit(rank.room.answer, 0, 3)
        try:
            assert _waits(answer)
            rank.step()
            assert _waits(answer)
        finally:
            while rank.steps < 3:  # or its thread would not end
                rank.step()
        assert answer.result(timeout=5) == _state(3)


def test_who_is_asked_within_its_step_answers_after_it() -> None:
    rank = _Rank()
    with ThreadPoolExecutor(1) as peer_queries:
        with rank.share.updating():
            answer = peer_queries.submit(rank.room.answer, 0, 1)
            assert _waits(answer)
            rank.steps = 1
        assert answer.result(timeout=5) == _state(1)


def test_who_is_ahead_of_the_question_refuses_it() -> None:
    rank = _Rank()
    rank.step()
    assert rank.room.answer(0, 1) == _state(1)
    rank.step()
    with pytest.raises(RuntimeError, match="asked for the state after step 1, this rank is at step 2"):
        rank.room.answer(0, 1)


def test_a_state_that_others_have_not_loaded_yet_is_not_given_to_them() -> None:
    rank = _Rank()
    rank.step()
    with rank.share.loading():
        rank.steps = 100
    assert rank.room.answer(0, 1) == _state(1)
    rank.step()
    assert rank.room.answer(0, 2) == _state(101)


def test_who_loads_twice_gives_others_the_state_from_before_both() -> None:
    rank = _Rank()
    rank.step()
    for steps in (100, 200):
        with rank.share.loading():
            rank.steps = steps
    assert rank.room.answer(0, 1) == _state(1)


def test_a_replacement_is_no_step_and_is_not_seen_half_made() -> None:
    """As early updates make them, before step()."""
    rank = _Rank()
    rank.step()
    with ThreadPoolExecutor(1) as peer_queries:
        with rank.share.replacing():
            answer = peer_queries.submit(rank.room.answer, 0, 1)
            assert _waits(answer)
        assert answer.result(timeout=5) == _state(1)


def test_who_is_asked_for_a_parameter_before_it_has_loaded_it_answers_after_it() -> None:
    rank = _Rank()
    rank.step()
    with rank.share.taking(4):
        pass
    with ThreadPoolExecutor(1) as peer_queries:
        answer = peer_queries.submit(rank.room.parameters, 1, (3, 4), (1, 1))
        assert _waits(answer)
        with rank.share.taking(4):  # of another load, which is not that one
            pass
        assert _waits(answer)
        with rank.share.taking(3):
            pass
        answer.result(timeout=5)
    rank.room.parameters(1, (4,), (1,))
    rank.room.parameters(1, (5,), (0,))
    with ThreadPoolExecutor(1) as peer_queries:  # a step comes after all loads
        answer = peer_queries.submit(rank.room.parameters, 2, (3,), (0,))
        assert _waits(answer)
        rank.step()
        answer.result(timeout=5)


def test_one_part_of_the_state_is_given_as_it_was_before_a_loading() -> None:
    rank = _Rank()
    rank.step()
    assert rank.room.answer(0, 1, 0) == _state(1)
    assert rank.room.answer(0, 1, 7) == {}
    with rank.share.loading():
        rank.steps = 100
    assert rank.room.answer(0, 1, 0) == _state(1)
    assert rank.room.answer(0, 1, 7) == {}
    assert rank.room.answer(0, 1, OUTLINE) == {0: (0, 1, {})}


def test_what_scripts_have_written_is_taken_over_before_an_update_and_once() -> None:
    rank, seen = _Rank(), []
    rank.share.copies = {torch.zeros(1): {}}

    def flush() -> None:
        seen.append(rank.steps)
        rank.share.copies.clear()

    rank.share.flush = flush
    rank.step()
    with rank.share.replacing():
        pass
    assert seen == [0]
