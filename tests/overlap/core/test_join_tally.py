"""What ranks conclude from a tally when some may have joined."""

from __future__ import annotations

from enum import Enum

import pytest

from overlap.core.tally import Call, Said, Verdict
from tests.overlap.core.channels_model import heard_of
from tests.overlap.core.join_tally import JoinCalls, JoinHeard, JoinSaid, JoinVerdict, join_verdict


def heard(*said: Said) -> JoinHeard:
    return heard_of(said, JoinHeard)


def close(
    rank: int, number: int | None, *, round: int = 3, failed: bool = False, gone: bool = False, needs: int = 0
) -> Said:
    return JoinSaid(Call.CLOSE, round, rank, number, failed=failed, gone=gone, needs=needs)


def drop(rank: int, number: int) -> Said:
    return JoinSaid(Call.DROP, 3, rank, number, sent=True)


def ask(rank: int, number: int, needs: int = 0) -> Said:
    return JoinSaid(Call.ASK, 3, rank, number, needs=needs)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([close(0, None), close(1, None)], JoinVerdict.JOINED),
        ([close(0, None), close(1, None, failed=True)], JoinVerdict.JOINED),  # what is left there is nobody's concern
        ([close(0, None), close(1, None, round=0, gone=True)], JoinVerdict.JOINED),
        ([close(0, 2), close(1, None, round=0, gone=True)], JoinVerdict.GONE),
        ([drop(0, 2), close(1, None, round=0, gone=True)], JoinVerdict.GONE),  # which completes no round
        ([close(0, 2), ask(1, 2, needs=3), close(2, None)], JoinVerdict.REFUSED),
        ([close(0, 2), close(1, None, needs=3)], JoinVerdict.REFUSED),  # its join() has failed
        ([drop(0, 2), close(1, 3, needs=3), close(2, None)], Verdict.DROPPED),  # which says so again
        ([close(0, 2, round=4, needs=3), close(1, None)], Verdict.DIFFERENT_CALLS),
        ([close(0, 2, needs=1), close(1, 2, needs=1)], Verdict.AGREED),  # nobody has joined
        ([close(0, 2), close(1, None)], Verdict.AGREED),
        ([close(0, 2), close(1, None, failed=True)], Verdict.FAILED),
    ],
)
def test_verdict(said: list[Said], expected: Enum) -> None:
    assert join_verdict(heard(*said)) is expected


def test_what_any_rank_says_is_heard_behind_what_the_library_says() -> None:
    found = heard(close(0, 2, needs=2), close(3, None, needs=1), close(1, None, gone=True))
    assert (found.joined, found.gone, found.needs) == (3, 1, 2)
    assert (found.closing, found.last, found.first_round) == (0, 2, 3)
    found = heard(close(0, 2), close(1, 2))
    assert (found.joined, found.gone, found.needs) == (None, None, 0)


def test_no_call_is_free_once_all_have_joined() -> None:
    calls = JoinCalls()
    calls.count()
    calls.alone = True
    calls.meet()
    assert (calls.last, calls.doubt) == (0, False)
    calls.count()
    assert calls.doubt
