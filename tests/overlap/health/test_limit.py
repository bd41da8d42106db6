"""A clock that asks nobody."""

from __future__ import annotations

import logging
import threading

import pytest

from overlap.health.limit import Limit


def test_what_takes_longer_than_its_limit_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    ended, statuses = threading.Event(), list[int]()

    def abort(status: int) -> None:
        statuses.append(status)
        ended.set()

    limit = Limit(lambda: "rank 0 waits", warn_after=0.01, abort_after=0.05, abort=abort)
    with caplog.at_level(logging.WARNING, "dear"), limit:
        assert ended.wait(30)
    assert statuses == [1]
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0 waits, for 0.01 s",
        "rank 0 waits, for 0.05 s (DEAR_STALL_ABORT_SECONDS); this process ends",
    ]


@pytest.mark.parametrize("limits", [(0.0, 0.0), (60.0, 60.0), (0.0, 60.0)])
def test_what_is_done_in_time_is_not_heard_of(limits: tuple[float, float]) -> None:
    def abort(_status: int) -> None:
        raise AssertionError("it is done")

    with Limit(lambda: "", warn_after=limits[0], abort_after=limits[1], abort=abort) as limit:
        pass
    if limit._thread.ident is not None:
        limit._thread.join(30)
    assert not limit._thread.is_alive()
