"""What ranks conclude from a tally, and when a rank is in doubt."""

from __future__ import annotations

import pytest

from overlap.core.tally import Call, Calls, Heard, Said, Verdict, verdict


def heard(*said: Said) -> Heard:
    return Heard.of([int(max(column)) for column in zip(*(one.numbers() for one in said), strict=True)])


def close(rank: int, number: int | None, *, round: int = 3, **details: bool) -> Said:
    return Said(Call.CLOSE, round, rank, number, **details)


def drop(rank: int, number: int) -> Said:
    return Said(Call.DROP, 3, rank, number, sent=True)


def ask(rank: int, number: int) -> Said:
    return Said(Call.ASK, 3, rank, number)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([close(0, 2, sent=True), close(1, 2, sent=True)], Verdict.AGREED),
        ([close(0, 2, sent=True), close(1, 3)], Verdict.AGREED),  # one was in doubt, for nothing
        ([close(0, 2, sent=True), close(1, None)], Verdict.AGREED),  # one has joined
        ([drop(0, 2), close(1, 3)], Verdict.DROPPED),
        ([drop(0, 2), drop(1, 2)], Verdict.DROPPED),
        ([drop(0, 2), close(1, None, sent=True)], Verdict.DROPPED),
        ([drop(0, 2), ask(1, 3)], Verdict.DROPPED),
        ([drop(0, 2), close(1, 3, failed=True)], Verdict.DROPPED),  # which says so again, of the next round
        ([drop(0, 2), close(1, 2)], Verdict.APART),  # steps in that very call
        ([drop(0, 1), close(1, 2, sent=True)], Verdict.APART),
        ([drop(0, 2), close(1, 1)], Verdict.APART),
        ([drop(0, 2), close(1, 3, sent=True)], Verdict.APART),  # has sent what the other takes for its part
        ([drop(0, 1), drop(1, 2)], Verdict.DROPPED),  # by the model's zero_grad() and the optimizer's
        ([drop(0, 2), drop(1, 3)], Verdict.APART),
        ([drop(0, 2), close(1, 3), close(2, 2, sent=True)], Verdict.APART),
        ([close(0, 3, alone=True), close(1, 2, sent=True)], Verdict.APART),  # skipped a step alone
        ([close(0, 3, alone=True), close(1, 3)], Verdict.AGREED),  # all skipped it, and nobody had sent anything
        ([close(0, 2), close(1, 2, failed=True)], Verdict.FAILED),
        ([close(0, 2), ask(1, 2)], Verdict.DIFFERENT_CALLS),
        ([close(0, 1, round=4), close(1, 1)], Verdict.DIFFERENT_CALLS),
    ],
)
def test_verdict(said: list[Said], expected: Verdict) -> None:
    assert verdict(heard(*said)) is expected


def test_what_any_rank_says_is_heard() -> None:
    found = heard(
        close(0, 2, sent=True, late=True), close(1, 4, converted=True), Said(Call.ASK, 3, 5, 3, gradients=True)
    )
    assert (found.gradients, found.late, found.converted, found.unconverted, found.failed) == (1, 1, 1, 1, 0)
    assert (found.first_round, found.last_round) == (3, 3)
    assert (found.asking, found.closing, found.dropping) == (5, 1, None)
    assert (found.drop, found.others, found.last, found.sent) == (None, 2, 4, True)
    assert not heard(drop(0, 2), close(1, 4)).sent
    assert not found.alike
    assert heard(close(0, 2), close(1, 2), close(2, None)).alike
    assert heard(drop(4, 2), close(1, 5)).dropping == 4
    assert heard(drop(4, 2), close(1, 5)).going_on == 1
    assert heard(close(4, 2, alone=True), close(1, 5)).dropping == 4


def test_one_call_after_a_step_is_free_and_none_after_a_drop() -> None:
    calls = Calls()
    calls.count()
    assert not calls.doubt
    calls.count()
    assert calls.doubt
    calls.drop()
    assert (calls.last, calls.doubt) == (0, False)
    calls.count()
    assert calls.doubt
    calls.step(alike=False)
    assert (calls.last, calls.doubt) == (0, False)


def _count(calls: Calls, times: int) -> None:
    for _ in range(times):
        calls.count()


def test_scripts_that_always_make_two_calls_are_learned() -> None:
    calls = Calls()
    for step in range(12):
        _count(calls, 2)
        assert calls.doubt is (step < 8)
        calls.step(alike=True)
    _count(calls, 3)
    assert calls.doubt
    calls.step(alike=True)
    _count(calls, 1)
    calls.step(alike=True)  # one step with less, and two say something again
    _count(calls, 2)
    assert calls.doubt


def test_what_only_those_with_gradients_count_comes_between_the_calls_of_all() -> None:
    dropping, empty = Calls(), Calls()
    for calls in (dropping, empty):
        calls.count()
    dropping.count(unseen=True)
    assert empty.last < dropping.last < empty.next


def test_gradients_that_were_dropped_alone_leave_a_doubt() -> None:
    calls = Calls()
    calls.alone = True
    assert calls.doubt
    calls.passed(0)
    assert not calls.doubt


def test_steps_to_which_ranks_came_after_different_calls_teach_nothing() -> None:
    """Else what is free would differ between ranks."""
    calls = Calls()
    for _ in range(12):
        _count(calls, 2)
        assert calls.doubt
        calls.step(alike=False)


def test_what_was_called_behind_the_call_in_which_others_dropped_is_a_doubt() -> None:
    calls = Calls()
    _count(calls, 2)
    calls.passed(2)  # in the first one
    assert calls.doubt


def test_no_call_is_free_after_others_have_dropped() -> None:
    calls = Calls()
    calls.count()
    calls.passed(2)
    assert not calls.doubt
    calls.count()
    assert calls.doubt
