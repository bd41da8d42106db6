"""What the watchdog reports while every rank answers, without any other rank."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from overlap.settings import Settings
from overlap.watchdog import Watchdog


class _Operation:
    """Asked for at time 0."""

    seconds = 0.0

    def describe(self) -> str:
        return "allreduce 'lost'"


def test_an_operation_goes_on_being_reported_after_the_time_at_which_dead_ranks_end_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def abort(_status: int) -> None:
        raise AssertionError("every rank answers")

    comm: Any = SimpleNamespace(rank=0, size=1, abort=abort, pending=list, lines=dict)
    settings = Settings(stall_warn_seconds=3.0, stall_abort_seconds=6.0)
    watchdog = Watchdog(comm, comm, mailroom=SimpleNamespace(), host="here", settings=settings)  # type: ignore[arg-type]
    operation = _Operation()
    with caplog.at_level(logging.WARNING, "dear"):
        for second in range(1, 21):
            operation.seconds = float(second)
            monkeypatch.setattr("overlap.watchdog.time.monotonic", lambda now=100.0 + second: now)
            watchdog._judge(operation)
    waited = [int(record.getMessage().split(" has waited ")[1].split()[0]) for record in caplog.records]
    assert waited == [4, 7, 10, 13, 16, 19]
