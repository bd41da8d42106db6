"""The end of a round on its thread."""

from __future__ import annotations

import pytest

from co2.communication import RoundThread


def test_what_is_dropped_ends_and_does_not_land() -> None:
    done: list[str] = []
    thread = RoundThread(lambda: done.append("work"), lambda: done.append("landed"))
    thread.end()
    assert done == ["work"]
    thread.land()
    assert done == ["work", "landed"]


def test_what_fails_raises_where_it_is_awaited_and_does_not_land() -> None:
    done: list[str] = []

    def fail() -> None:
        raise ArithmeticError("in a round")

    thread = RoundThread(fail, lambda: done.append("landed"))
    for wait in (thread.end, thread.land):
        with pytest.raises(ArithmeticError, match="in a round"):
            wait()
    assert not done
