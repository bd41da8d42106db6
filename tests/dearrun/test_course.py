"""What becomes of a call of dear.run, by what its ranks have done and when."""

from __future__ import annotations

import pickle

import pytest

from dearrun.course import Course
from dearrun.errors import LaunchError, RankError
from dearrun.exchange import Answer, Hello, Lost


def _course(*events: Hello | Answer | Lost, start_timeout: float = 100.0) -> Course:
    course = Course(2, start_timeout, 0.0)
    for event in events:
        course.note(event, 1.0)
    return course


def _raised(rank: int) -> Answer:
    return Answer(rank, pickle.dumps(KeyError(rank)), "the traceback", f"KeyError: {rank}")


HERE = (Hello(0, 2), Hello(1, 2))
RESULTS = (Answer(0, b"0"), Answer(1, b"1"))


def test_a_call_returns_when_all_have() -> None:
    assert not _course(*HERE, RESULTS[0]).all_returned
    assert _course(*HERE, *RESULTS, Lost(0), Lost(1)).all_returned
    assert not _course(*HERE, RESULTS[0], _raised(1)).all_returned


def test_nobody_waits_for_ever_but_for_ranks_at_work() -> None:
    _course(*HERE).require(None, 1e9)
    course = _course(HERE[1])
    course.require(None, 99.0)
    with pytest.raises(LaunchError, match=r"^1 of 2 ranks did not start \(ranks 0\): start_timeout=100 s are over"):
        course.require(None, 100.0)
    with pytest.raises(LaunchError, match=r"^1 of 2 ranks did not start \(ranks 0\): start_timeout=100 s are over"):
        course.note(HERE[0], 100.0)
    course = _course(HERE[1], Lost(1))
    with pytest.raises(RankError, match="rank 1 of 2 ended without an answer; the job ended with status 9"):
        course.require(9, 2.0)


def test_what_was_sent_is_read_after_the_launchers_end() -> None:
    course = _course(*HERE, RESULTS[0])
    course.require(0, 2.0)
    course.require(0, 6.9)
    with pytest.raises(RankError, match="rank 1 of 2 ended without an answer; the job ended with status 0"):
        course.require(0, 7.0)
    course.note(RESULTS[1], 6.9)
    assert course.all_returned


def test_others_have_a_while_to_raise_as_well() -> None:
    course = _course(*HERE, _raised(1))
    course.require(None, 2.9)
    with pytest.raises(RankError) as caught:
        course.require(None, 3.0)
    assert (caught.value.rank, set(caught.value.exceptions)) == (1, {1})
    course.note(_raised(0), 2.0)
    with pytest.raises(
        RankError, match=r"rank 1 of 2 raised KeyError: 1\n\nthe traceback\n\nOther .*\nrank 0: KeyError: 0"
    ) as both:
        course.require(None, 2.0)
    assert repr(both.value.exceptions) == "{0: KeyError(0), 1: KeyError(1)}"
    again = pickle.loads(pickle.dumps(both.value))
    assert (str(again), again.rank, again.tracebacks) == (str(both.value), 1, both.value.tracebacks)


def test_a_call_that_has_failed_does_not_wait_for_ranks_that_begin_later() -> None:
    course = _course(HERE[0], _raised(0), HERE[1])
    course.require(None, 2.9)
    with pytest.raises(RankError, match="rank 0 of 2 raised KeyError: 0"):
        course.require(None, 3.0)


def test_a_job_of_another_size_is_none() -> None:
    for second in (Hello(0, 2), Hello(0, 1)):
        with pytest.raises(LaunchError, match=f"it is rank 0 of {second.size}: the mpirun is probably not of the MPI"):
            _course(HERE[0], second)
