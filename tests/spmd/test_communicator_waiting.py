"""How long a communicator's callers wait, and letters: every backend keeps one contract."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import comm_core
from comm_core import InvalidUsage
from overlap.job.session import current, init
from overlap.transport.communicator import Communicator
from overlap.transport.operation import all_reduce, barrier


@pytest.fixture
def comm() -> Communicator:
    return init().comm


def test_waiting_with_a_limit(comm: Communicator) -> None:
    if comm.size == 1:
        pytest.skip("nobody to wait for")
    other = current().control  # which tells the others to go on
    if comm.rank == 0:
        late = torch.ones(1)
        work = comm.start(all_reduce(late, late))
        with pytest.raises(comm_core.TimeoutError):
            work.wait(0.05)
        assert work in comm.pending() or not work.done()
        other.run(barrier())
        work.wait()
    else:
        other.run(barrier())
        comm.run(all_reduce(torch.ones(1), torch.ones(1)))


def test_letters_to_nobody_and_after_the_end_are_refused(comm: Communicator) -> None:
    with pytest.raises(InvalidUsage, match="peer"):
        comm.post(comm.size, b"x")
    part = comm.split(0)
    assert part is not None
    part.post(part.rank, b"to myself")
    assert part.receive_post(20) == (part.rank, b"to myself")
    part.close()
    for use in (lambda: part.post(0, b"x"), lambda: part.run(barrier()), lambda: part.receive_post(0)):
        with pytest.raises(InvalidUsage, match="closed"):
            use()


@pytest.mark.parametrize("timeout", [-1, float("-inf"), float("nan")])
def test_a_timeout_that_is_no_duration_is_refused_at_once(comm: Communicator, timeout: float) -> None:
    work = comm.start(barrier())
    with pytest.raises(ValueError, match=r"timeout is .*None to wait for ever"):
        work.wait(timeout)
    with pytest.raises(ValueError, match=r"timeout is .*None to wait for ever"):
        comm.receive_post(timeout)
    work.wait()
    with pytest.raises(ValueError, match="timeout is"):
        work.wait(timeout)  # though it is done


@pytest.mark.parametrize("timeout", [None, float("inf"), 1e300, 1e10])
def test_a_timeout_may_be_longer_than_clocks_count(comm: Communicator, timeout: float | None) -> None:
    if comm.size > 1:
        if comm.rank:
            time.sleep(0.01)
        comm.start(barrier()).wait(timeout)
    part = comm.split(0)  # whose letters no thread of the session's reads
    assert part is not None
    posting = threading.Timer(0.01, lambda: part.post(part.rank, b"late"))
    posting.start()
    assert part.receive_post(timeout) == (part.rank, b"late")
    posting.join()
    part.close()
