"""Buffers live as long as somebody transfers them; waits can be left; works tell what they do."""

from __future__ import annotations

import gc
import math
import signal
import threading
import time
import weakref

import numpy as np
import pytest

import comm_core
from comm_core import Buffer, Communicator, DType


class Owner:
    """Something whose end can be watched."""

    def __init__(self, count: int, value: float) -> None:
        self.data = np.full(count, value, np.float32)

    def buffer(self) -> Buffer:
        return Buffer(self.data.ctypes.data, self.data.size, DType.FLOAT32, owner=self)


def _gone(ref: weakref.ref[Owner], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while ref() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return ref() is None


def test_dropped_buffers_and_works_live_until_the_transfer_is_done(comm: Communicator) -> None:
    result = np.zeros(200_000, np.float32)
    refs = []
    for value in range(5):
        owner = Owner(result.size, value)
        refs.append(weakref.ref(owner))
        comm.all_reduce_async(owner.buffer(), result)
        del owner
    comm.barrier()
    assert result[0] == result[-1] == 4 * comm.size
    assert all(_gone(ref) for ref in refs), "a buffer is kept although its operation is done"


def test_arrays_are_let_go_when_wait_returns(comm: Communicator) -> None:
    data = bytearray(1000)
    comm.broadcast_async(data).wait()
    data += b"x"  # a bytearray whose memory somebody holds refuses to grow


def test_a_persistent_operation_keeps_memory_and_may_be_under_way_many_times(comm: Communicator) -> None:
    owner, result = Owner(50_000, 1.0), np.zeros(50_000, np.float32)
    ref = weakref.ref(owner)
    operation = comm.all_reduce_init(owner.buffer(), result, label="again")
    works = [operation.start() for _ in range(10)]
    assert [work.label for work in works] == ["again"] * 10
    works[-1].wait()
    assert all(work.done() for work in works)
    assert result[0] == result[-1] == comm.size
    owner.data[:] = 2.0
    operation.start().wait()
    assert result[0] == 2 * comm.size
    del owner
    assert not _gone(ref, 0.1)
    operation.start().wait()
    del operation
    assert _gone(ref), "a buffer is kept although the operation cannot be started any more"


def test_a_persistent_operation_outlives_its_communicators_name_and_not_its_close(comm: Communicator) -> None:
    part = comm.split(0)
    assert part is not None
    operation = part.all_gather_init(np.full(3, comm.rank, np.int32), np.zeros(3 * comm.size, np.int32))
    again = part.reduce_scatter_init(np.ones(comm.size, np.int32), np.zeros(1, np.int32))
    operation.start().wait()
    last = again.start()
    part.close()
    assert last.done()
    with pytest.raises(comm_core.InvalidUsage, match="is closed"):
        operation.start()
    del part
    with pytest.raises(comm_core.InvalidUsage, match="is closed"):
        again.start()


def test_memory_of_an_operation_that_is_over_is_let_go_on_any_thread() -> None:
    alone, errors = comm_core.local(), []

    def use() -> None:
        data, result = bytearray(4), bytearray(4)
        alone.all_reduce_async(data, result)
        with pytest.raises(comm_core.InvalidUsage):
            alone.all_gather_async(data, bytearray(1))
        try:
            data += b"x"  # a bytearray whose memory somebody holds refuses to grow
        except BufferError as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert not errors


def test_a_work_keeps_no_memory_once_done(comm: Communicator) -> None:
    owner = Owner(10, 1.0)
    work = comm.all_reduce_async(owner.buffer(), np.zeros(10, np.float32))
    ref = weakref.ref(owner)
    work.wait()
    del owner
    assert _gone(ref)


def _never(comm: Communicator) -> comm_core.Work:
    """A receive that waits until `_release`."""
    return comm.recv_async(np.zeros(4, np.float32), comm.rank, 77, label="never")


def _release(comm: Communicator, work: comm_core.Work) -> None:
    comm.send(np.zeros(4, np.float32), comm.rank, 77)
    work.wait(10)


def test_timeout(comm: Communicator) -> None:
    work = _never(comm)
    began = time.monotonic()
    with pytest.raises(comm_core.TimeoutError, match=r"recv 'never'.*unfinished"):
        work.wait(0.2)
    assert 0.15 < time.monotonic() - began < 5
    with pytest.raises(TimeoutError):
        work.wait(0)
    assert not work.done()
    assert work.exception() is None
    assert [w.label for w in comm.pending()] == ["never"]
    assert 0.2 <= work.seconds < 10
    assert "never" in work.describe()
    assert "never" in repr(work)
    _release(comm, work)
    assert work.done()
    assert comm.pending() == []
    total = work.seconds
    time.sleep(0.01)
    assert work.seconds == total


@pytest.mark.parametrize("timeout", [-1, -math.inf, math.nan])
def test_a_timeout_that_is_no_duration_is_refused_at_once(comm: Communicator, timeout: float) -> None:
    work = _never(comm)
    for wait in (work.wait, comm.receive_post):
        with pytest.raises(comm_core.InvalidUsage, match=r"timeout is -?(1\.0|inf|nan).*None to wait for ever"):
            wait(timeout)
    _release(comm, work)
    with pytest.raises(ValueError, match="timeout is"):
        work.wait(timeout)  # though it is done


@pytest.mark.parametrize("timeout", [None, math.inf, 1e300, 1e10])
def test_a_timeout_may_be_longer_than_clocks_count(comm: Communicator, timeout: float | None) -> None:
    work = _never(comm)
    later = threading.Timer(0.01, lambda: comm.send(np.zeros(4, np.float32), comm.rank, 77))
    later.start()
    work.wait(timeout)
    later.join()
    later = threading.Timer(0.01, lambda: comm.post(comm.rank, b"late"))
    later.start()
    assert comm.receive_post(timeout) == (comm.rank, b"late")
    later.join()


def test_ctrl_c_leaves_a_wait(comm: Communicator) -> None:
    work = _never(comm)
    timer = threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        work.wait(20)
    timer.join()
    _release(comm, work)


def test_waits_release_the_interpreter(comm: Communicator) -> None:
    work = _never(comm)
    counted: list[int] = []
    thread = threading.Thread(target=lambda: counted.extend(range(1000)))
    thread.start()
    with pytest.raises(comm_core.TimeoutError):
        work.wait(0.1)
    thread.join()
    assert len(counted) == 1000
    _release(comm, work)


def test_many_threads_wait_for_one_work(comm: Communicator) -> None:
    work = _never(comm)
    threads = [threading.Thread(target=work.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    _release(comm, work)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_order_before_waits_on_the_cpu(comm: Communicator) -> None:
    data = np.ones(100_000)
    work = comm.all_reduce_async(data, data)
    work.order_before(0)
    assert work.done()
    assert data[0] == comm.size


def test_the_twenty_thousandth_unfinished_operation_costs_what_the_first_does() -> None:
    alone = comm_core.local()
    data = np.zeros(1, np.int8)

    def seconds_of_a_thousand() -> float:
        began = time.thread_time()
        for _ in range(1000):
            alone.recv_async(data, 0, 9)
        return time.thread_time() - began

    times = [seconds_of_a_thousand() for _ in range(20)]
    assert min(times[-4:]) < 4 * min(times[:4])
    assert len(alone.pending()) == 20_000
    for _ in range(20_000):
        alone.send_async(data, 0, 9)
    assert alone.pending() == []


def test_many_operations_without_waiting(comm: Communicator) -> None:
    data = [np.ones(50, np.float32) for _ in range(500)]
    works = [comm.all_reduce_async(d, d) for d in data]
    assert len(comm.pending()) <= 500
    works[-1].wait()
    assert all(w.done() for w in works)
    assert all(d[0] == comm.size for d in data)
