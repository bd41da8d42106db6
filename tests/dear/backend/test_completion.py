"""Futures are completed by one thread."""

from __future__ import annotations

import threading

import pytest
import torch

import comm_core
from dear.backend.completion import Completer


class Slow:
    """Something that is over when the test says so."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def settle(self, patience: float | None) -> None:
        if not self.over.wait(patience):
            raise comm_core.TimeoutError("not yet")


def test_a_future_has_the_result_once_it_is_there() -> None:
    completer, slow = Completer("test", None), Slow()
    future = completer.promise(slow.settle, lambda: [torch.ones(2)])
    assert not future.done()
    slow.over.set()
    assert torch.equal(future.wait()[0], torch.ones(2))
    completer.close()


def test_an_error_reaches_whoever_waits_and_what_follows() -> None:
    completer = Completer("test", None)

    def fails(_patience: float | None) -> None:
        raise comm_core.TransportError("rank 1 is lost")

    future = completer.promise(fails, list)
    following = future.then(lambda done: done.value())
    for one in (future, following):
        with pytest.raises(RuntimeError, match="rank 1 is lost"):
            one.wait()
    completer.close()


def test_messages_do_not_wait_for_others() -> None:
    completer, late, early = Completer("test", 0.001), Slow(), Slow()
    first = completer.promise(late.settle, lambda: "late")
    second = completer.promise(early.settle, lambda: "early")
    early.over.set()
    assert second.wait() == "early"
    assert not first.done()
    late.over.set()
    assert first.wait() == "late"
    completer.close()


def test_what_was_promised_is_there_when_it_closes() -> None:
    completer, slow = Completer("test", 0.001), Slow()
    future = completer.promise(slow.settle, lambda: 1)
    threading.Timer(0.05, slow.over.set).start()
    completer.close()
    assert future.done()
