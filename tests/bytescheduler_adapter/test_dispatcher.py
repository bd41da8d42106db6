"""What becomes of partitions when their dispatcher is closed."""

from __future__ import annotations

import math

import pytest
import torch

import comm_core
from bytescheduler_adapter.dispatcher import Dispatcher, Part, PartsWork
from overlap.transport.communicator import ReduceOp
from overlap.transport.native import NativeCommunicator
from overlap.transport.operation import Operation
from overlap.transport.torch.gloo import GlooWork

OVER = "the session that this optimizer belongs to was shut down"


class Slow(NativeCommunicator):
    """Reductions end when they are told to."""

    def start(self, operation: Operation) -> GlooWork:
        return GlooWork("all_reduce", "", 16, "rank 0 of 1")


def _part() -> Part:
    flat = torch.ones(4)
    return Part(flat, flat, ReduceOp.SUM, "")


def _waiting_for_credit() -> tuple[Dispatcher, int, PartsWork, Part, Part]:
    """A dispatcher that has issued one of two partitions, the optimizer's number, both partitions as one, and each."""
    dispatcher = Dispatcher(Slow(comm_core.local()))
    number = dispatcher.register()
    issued, waits = _part(), _part()
    work = dispatcher.submit(number, 0, [issued, waits], "b0", credit=1)  # for one at a time
    dispatcher.await_issue(issued, work, None)
    with pytest.raises(comm_core.TimeoutError, match="1 of 2 partitions issued"):
        dispatcher.await_issue(waits, work, 0.0)
    return dispatcher, number, work, issued, waits


def test_what_was_submitted_is_issued_at_the_end_whatever_the_credit() -> None:
    dispatcher, number, work, issued, waits = _waiting_for_credit()
    dispatcher.close(given_up=False)
    with pytest.raises(comm_core.InvalidUsage, match=f"b1: {OVER}"):
        dispatcher.submit(number, 1, [_part()], "b1", credit=1)
    dispatcher.join(lambda: None)  # while the first is under way
    for part in (issued, waits):
        assert part.work is not None
        assert not part.work.done()
        part.work.finish()  # type: ignore[attr-defined]
    work.wait()


def test_what_is_given_up_is_an_error_and_no_wait() -> None:
    dispatcher, number, work, issued, _ = _waiting_for_credit()
    dispatcher.close(given_up=True)
    issued.work.finish()  # type: ignore[union-attr]
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
