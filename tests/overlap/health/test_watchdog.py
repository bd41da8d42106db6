"""What the watchdog reports while every rank answers, without any other rank."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from overlap.health.watchdog import Watchdog


class _Operation:
    """Asked for at time 0."""

    seconds = 0.0

    def describe(self) -> str:
        return "allreduce 'lost'"


class _Ended(Exception):
    pass


def _end(_status: int) -> None:
    raise _Ended


def test_a_rank_that_does_not_answer_ends_the_job_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    comm: Any = SimpleNamespace(rank=0, size=1, abort=_end, pending=list, lines=dict)
    limits = {"warn_after": 0.0, "abort_after": 6.0}
    watchdog = Watchdog(comm, comm, peer_queries=SimpleNamespace(), host="here", **limits)  # type: ignore[arg-type]
    monkeypatch.setattr(watchdog, "_ask_all", lambda: {0: watchdog._standing(), 1: None})
    operation = _Operation()
    operation.seconds = 6.0
    watchdog._judge(operation)
    operation.seconds = 6.1
    with caplog.at_level(logging.WARNING, "dear"), pytest.raises(_Ended):
        watchdog._judge(operation)
    assert "rank 1: no answer" in caplog.text
    assert "rank(s) [1] will not come" in caplog.text


def test_who_waits_is_told_apart_from_who_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    comm: Any = SimpleNamespace(rank=0, size=1, abort=_end, pending=list, lines=dict)
    limits = {"warn_after": 3.0, "abort_after": 0.0}
    operation = _Operation()
    operation.seconds = 4.0
    for mine in (True, False):
        watchdog = Watchdog(comm, comm, peer_queries=SimpleNamespace(), host="here", **limits)  # type: ignore[arg-type]
        with caplog.at_level(logging.WARNING, "dear"):
            watchdog._judge(operation, mine)
    said = [record.getMessage().split(". All ranks")[0] for record in caplog.records]
    assert said == ["rank 0 has waited 4 s for allreduce 'lost'", "allreduce 'lost' has waited 4 s"]


def test_an_operation_goes_on_being_reported_after_the_time_at_which_dead_ranks_end_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def abort(_status: int) -> None:
        raise AssertionError("every rank answers")

    comm: Any = SimpleNamespace(rank=0, size=1, abort=abort, pending=list, lines=dict)
    limits = {"warn_after": 3.0, "abort_after": 6.0}
    watchdog = Watchdog(comm, comm, peer_queries=SimpleNamespace(), host="here", **limits)  # type: ignore[arg-type]
    operation = _Operation()
    with caplog.at_level(logging.WARNING, "dear"):
        for second in range(1, 21):
            operation.seconds = float(second)
            monkeypatch.setattr("overlap.health.watchdog.time.monotonic", lambda now=100.0 + second: now)
            watchdog._judge(operation)
    waited = [int(record.getMessage().split(" has waited ")[1].split()[0]) for record in caplog.records]
    assert waited == [4, 7, 10, 13, 16, 19]
