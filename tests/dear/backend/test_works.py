"""Calls of a group are there for as long as the C++ of torch may wait for them."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from typing import Any, cast

import pytest
import torch

import comm_core
from dear.backend import works
from dear.backend.completion import Completer
from dear.backend.works import GroupWork, as_one


class _Operation:
    """One of the engine, which is over when the test says so."""

    op = "all_reduce"

    def __init__(self) -> None:
        self.over = False

    def wait(self, _patience: float) -> None:
        if not self.over:
            raise comm_core.TimeoutError("not yet")

    def done(self) -> bool:
        return self.over

    def exception(self) -> None:
        return None


class _Group:
    ended = ""

    def __init__(self) -> None:
        self.futures = Completer("test", None)

    def end(self, reason: str) -> None:
        raise AssertionError(reason)

    def completer(self, messages: bool) -> Completer:
        assert not messages
        return self.futures


def _call(group: _Group, operation: _Operation) -> GroupWork:
    return GroupWork(group, cast(Any, operation), [torch.ones(2)], seconds=60.0)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_torch_that_keeps_no_works_has_them_until_they_are_waited_for(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(works, "_TORCH_KEEPS", keeps)
    operation = _Operation()
    call = weakref.ref(_call(_Group(), operation))
    gc.collect()
    assert (call() is None) == keeps
    if (one := call()) is not None:
        with pytest.raises(comm_core.TimeoutError):
            one.wait(timedelta(milliseconds=1))
        del one
        gc.collect()
        assert call() is not None, "its time to wait was up, and it goes on"
        operation.over = True
        call().wait()  # type: ignore[union-attr]
        gc.collect()
        assert call() is None


@pytest.mark.parametrize("keeps", [True, False])
def test_several_calls_are_waited_for_as_often_as_there_are_tensors(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(works, "_TORCH_KEEPS", keeps)
    group, operation = _Group(), _Operation()
    operation.over = True
    together = as_one([_call(group, operation), _call(group, operation)])
    assert isinstance(together, works._SeveralWorks) == keeps, "one of C++ is there for as long as C++ has it"
    assert together.wait()
    assert together.wait()
    assert not works._unwaited
    assert len(together.result()) == 2
    group.futures.close()
