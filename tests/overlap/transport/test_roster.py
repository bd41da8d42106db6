"""Processes of a job that comes and goes, as threads, each with its own connections to one store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from overlap.transport.torch import roster as module
from overlap.transport.torch.generations import Member
from overlap.transport.torch.roster import JobOver, Roster, agents_store

Start = Callable[[int, int], Roster]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts rank R for the K-th time."""
    monkeypatch.setattr(module, "_SIGN_SECONDS", 0.05)
    monkeypatch.setattr(module, "_LOST_SECONDS", 3.0)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.02)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made: list[Roster] = []

    def begin(rank: int, attempt: int) -> Roster:
        made.append(Roster(lambda: agents_store("127.0.0.1", server.port), Member(rank, attempt), 3))
        return made[-1]

    yield begin
    for roster in made:
        roster.end()


def _kill(roster: Roster) -> None:
    """No sign of life any more, and no word of its end."""
    roster._closing.set()
    roster._thread.join()


def _regroup(rosters: list[Roster]) -> list[int]:
    with ThreadPoolExecutor(len(rosters)) as pool:
        return list(pool.map(Roster.regroup, rosters))


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it has not come to that"
        time.sleep(0.01)


def test_those_that_are_left_go_on_and_who_comes_back_is_let_in(start: Start) -> None:
    rosters = [start(rank, 0) for rank in range(3)]
    assert _regroup(rosters) == [0, 1, 2]
    assert not any(roster.stayed or roster.news for roster in rosters)
    for roster in rosters:
        roster.begin()
    first, second, third = rosters
    told = threading.Event()
    third.watch(told.set)

    _kill(second)
    assert told.wait(20)
    assert "[1] of 3 are lost" in third.news
    assert first.changes()
    assert _regroup([third, first]) == [1, 0]
    assert first.stayed
    assert third.stayed
    assert not first.news

    again = start(1, 1)
    with ThreadPoolExecutor(1) as pool:
        back = pool.submit(again.regroup)
        _until(lambda: first.somebody_waits and third.somebody_waits)
        assert not first.news, "those that train are not disturbed"
        while again.me not in first.members:
            assert _regroup([first, third]) == [0, 1]
        assert back.result(20) == 2
    assert not again.stayed
    assert again.late
    assert [roster.place() for roster in (first, again, third)] == [(0, 3), (1, 3), (2, 3)]
    assert first.members == again.members == [Member(0, 0), Member(2, 0), Member(1, 1)]


def test_nobody_is_late_where_nobody_has_come_out_of_init(start: Start) -> None:
    """A rank is lost while all connect."""
    rosters = [start(rank, 0) for rank in range(3)]
    _regroup(rosters)
    _kill(rosters[1])
    assert rosters[0].changes(20)
    assert rosters[2].changes(20)
    again = start(1, 1)
    with ThreadPoolExecutor(1) as pool:
        back = pool.submit(again.regroup)
        while again.me not in rosters[0].members:
            _regroup([rosters[0], rosters[2]])
        back.result(20)
    assert not again.late
    assert rosters[0].members == again.members


def test_who_gives_signs_of_life_can_be_given_up(start: Start) -> None:
    rosters = [start(rank, 0) for rank in range(3)]
    _regroup(rosters)
    told = threading.Event()
    rosters[1].on_given_up = told.set
    rosters[0].give_up([1])
    assert told.wait(20)
    assert rosters[2].changes(20)
    assert "[1] of 3 are lost" in rosters[2].news
    assert _regroup([rosters[0], rosters[2]]) == [0, 1]


def test_one_that_meets_again_tells_the_others(start: Start) -> None:
    rosters = [start(rank, 0) for rank in range(3)]
    _regroup(rosters)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rosters[0].regroup)  # its connections broke; all are there
        assert rosters[1].changes(20)
        assert rosters[2].changes(20)
        assert _regroup(rosters[1:]) == [1, 2]
        assert waiting.result(20) == 0


def test_who_was_taken_for_lost_comes_back_without_what_it_had(start: Start) -> None:
    rosters = [start(rank, 0) for rank in range(3)]
    _regroup(rosters)
    with rosters[2]._seeing:  # it is stopped
        assert rosters[0].changes(20)
        assert _regroup(rosters[:2]) == [0, 1]
    assert rosters[2].changes(20)
    with ThreadPoolExecutor(1) as pool:
        back = pool.submit(rosters[2].regroup)
        _until(lambda: rosters[0].somebody_waits)
        while rosters[2].me not in rosters[0].members:  # they may meet before they see that it is alive
            assert _regroup(rosters[:2]) == [0, 1]
        assert back.result(20) == 2
    assert not rosters[2].stayed


def test_there_is_nothing_to_come_back_to_once_the_others_have_ended(start: Start) -> None:
    rosters = [start(rank, 0) for rank in range(3)]
    _regroup(rosters)
    _kill(rosters[1])
    rosters[0].end()
    rosters[2].end()
    again = start(1, 1)
    with pytest.raises(JobOver, match="rank 1 comes when the others have come to the end"):
        again.regroup()


def test_where_nobody_is_left_all_begin_again(start: Start) -> None:
    rosters = [start(rank, 0) for rank in range(3)]
    _regroup(rosters)
    for roster in rosters:
        _kill(roster)
    again = [start(rank, 1) for rank in range(3)]
    assert _regroup(again) == [0, 1, 2]
    assert again[0].number == 2
    assert not any(roster.stayed or roster.late for roster in again)
