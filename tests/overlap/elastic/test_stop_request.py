"""SIGUSR1 inside `elastic.run`, and outside."""

from __future__ import annotations

import os
import signal

import pytest

from overlap.elastic import stop_request


def _ask() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def test_a_process_that_was_asked_to_stop_may_begin_again() -> None:
    for _ in range(2):
        with stop_request.heeded():
            assert not stop_request.received()
            _ask()
            assert stop_request.received()
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_handler_of_the_scripts_own_stays() -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: told.append(number))
    try:
        with stop_request.heeded():
            _ask()
            assert not stop_request.received()
        _ask()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told == [signal.SIGUSR1, signal.SIGUSR1]


def test_the_signal_means_nothing_any_more_once_an_exception_has_ended_the_training() -> None:
    with pytest.raises(ZeroDivisionError), stop_request.heeded():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
