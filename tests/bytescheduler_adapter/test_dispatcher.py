"""What becomes of partitions when their dispatcher is closed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import comm_core
from bytescheduler_adapter.dispatcher import Dispatcher, Part
from overlap.transport.communicator import ReduceOp
from overlap.transport.native import NativeCommunicator
from overlap.transport.torch.worker_thread import PendingWork

OVER = "the session that this optimizer belongs to was shut down"


class Slow(NativeCommunicator):
    """Reductions end when they are told to."""

    def all_reduce_async(self, *_: Any, **__: Any) -> PendingWork:  # type: ignore[override]
        self.last = PendingWork("all_reduce", "", 0, 1, 16)
        return self.last


def _part() -> Part:
    flat = torch.ones(4)
    return Part(flat, flat, ReduceOp.SUM, "")


def test_what_a_closed_dispatcher_has_not_issued_is_an_error_and_no_wait() -> None:
    channel = Slow(comm_core.local())
    dispatcher = Dispatcher(channel)
    number = dispatcher.register()
    issued, waits = _part(), _part()
    work = dispatcher.submit(number, 0, [issued, waits], "b0", credit=1)  # for one at a time
    dispatcher.await_issue(issued, work, None)
    with pytest.raises(comm_core.TimeoutError, match="1 of 2 partitions issued"):
        dispatcher.await_issue(waits, work, 0.0)
    dispatcher._closing = True  # as its thread sees it that has just been waiting for the first
    channel.last.finish()
    dispatcher.close()
    dispatcher.join()
    issued.work.wait()  # type: ignore[union-attr]
    for timeout in (None, math.inf, 1e300):
        with pytest.raises(comm_core.TransportError, match=f"'b0'.*{OVER}"):
            work.wait(timeout)
    for timeout in (-1.0, math.nan):
        with pytest.raises(ValueError, match="wait: timeout is"):
            work.wait(timeout)
    with pytest.raises(comm_core.InvalidUsage, match=f"b1: {OVER}"):
        dispatcher.submit(number, 1, [_part()], "b1", credit=1)
