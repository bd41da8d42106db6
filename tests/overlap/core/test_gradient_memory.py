"""Who waits, how long, and what goes, where more gradients are on their way than there is room for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import comm_core
from overlap.core import gradient_memory
from overlap.core.gradient_memory import GradientMemory

NBYTES = 100


class _Work:
    """A reduction that another rank takes part in after `late` seconds of waiting."""

    seconds = 0.01

    def __init__(self, late: float) -> None:
        self.late, self.waits = late, list[float]()

    def done(self) -> bool:
        return self.late <= 0

    def wait(self, timeout: float) -> None:
        self.waits.append(timeout)
        self.late -= timeout
        if self.late > 0:
            raise comm_core.TimeoutError("late")


class _Bucket:
    nbytes = NBYTES

    def __init__(self, late: float) -> None:
        self.work: _Work | None = _Work(late)
        self.settled = False

    def hold_gradients(self) -> None:
        pass

    def settle(self) -> None:
        self.settled = True


def _taken(late: float, limit: int | None) -> list[Any]:
    """Four buckets, of which two may be on their way."""
    memory = GradientMemory(lambda: 2 * NBYTES, lambda: 4 * NBYTES)
    memory.limit = limit
    buckets: list[Any] = [_Bucket(late) for _ in range(4)]
    for bucket in buckets:
        memory.take(bucket)
    return buckets


@pytest.fixture(autouse=True)
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_memory, "available_bytes", lambda: 2**40)
    monkeypatch.setattr(gradient_memory, "resident_bytes", lambda: 1000)


def _settled(buckets: list[Any]) -> list[bool]:
    return [bucket.settled for bucket in buckets]


def test_no_more_than_the_room_is_on_its_way() -> None:
    assert _settled(_taken(0.5, None)) == [True, True, False, False]


def test_without_a_limit_a_rank_that_is_late_costs_memory() -> None:
    assert _settled(_taken(20.0, None)) == [False] * 4


def test_a_limit_without_room_for_all_gradients_is_kept_though_a_rank_is_late() -> None:
    assert _settled(_taken(20.0, 1000 + 4 * NBYTES - 1)) == [True, True, False, False]


def test_a_limit_with_room_for_all_gradients_has_them_waited_for_and_taken_at_last() -> None:
    assert _settled(_taken(4.0, 1000 + 4 * NBYTES)) == [True, True, False, False]
    assert _settled(_taken(20.0, 1000 + 4 * NBYTES)) == [False] * 4


def test_a_rank_that_never_comes_is_awaited_for_a_minute_under_a_limit() -> None:
    first, *_ = _taken(1e9, 1000)
    assert not first.settled
    assert 60 <= sum(first.work.waits) <= 400


class _SayingWork:
    seconds = 0.1

    def __init__(self, said: list[str], number: int) -> None:
        self._said, self._number = said, number

    def done(self) -> bool:
        return False

    def wait(self, timeout: float) -> None:
        self._said.append(f"the host waits for {self._number}")


class _SayingBucket:
    nbytes = 10

    def __init__(self, said: list[str], number: int) -> None:
        self._said, self._number = said, number
        self.work: Any = _SayingWork(said, number)

    def hold_gradients(self) -> None:
        self._said.append(f"{self._number} has memory")

    def settle(self) -> None:
        self._said.append(f"{self._number} goes")
        self.work = None


@pytest.mark.parametrize("streams_wait", [False, True])
def test_the_oldest_goes_first_and_the_host_waits_where_no_stream_does(streams_wait: bool) -> None:
    said: list[str] = []
    memory = GradientMemory(lambda: 20, lambda: 1)
    memory.streams_wait = streams_wait
    for number in range(4):
        memory.take(_SayingBucket(said, number))  # type: ignore[arg-type]
    waits = [[] if streams_wait else [f"the host waits for {number}"] for number in range(2)]
    assert said == [
        *("0 has memory", "1 has memory", "2 has memory", *waits[0], "0 goes"),
        *("3 has memory", *waits[1], "1 goes"),
    ]


def test_it_says_how_long_was_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([10.0, 10.5, 20.0, 20.25])
    monkeypatch.setattr(gradient_memory, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    memory = GradientMemory(lambda: 2 * NBYTES, lambda: 4 * NBYTES)
    for _ in range(4):
        memory.take(_Bucket(0.0))  # type: ignore[arg-type]
    assert memory.waited == pytest.approx(0.75)
