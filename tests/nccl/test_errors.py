"""What is raised where, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

import comm_core
from comm_core import Buffer, DType, ReduceOp
from tests.gpu_double import Double, eventually


def test_asynchronous_errors_are_raised_with_rank_operation_and_bucket(gpu: Double) -> None:
    comms = gpu.world(2)
    a, b = np.ones(4, np.float32), np.zeros(2, np.float32)
    works = [
        comms[1].reduce_scatter_async(gpu.memory(a, 1), gpu.memory(b, 1), label=f"bucket {number}") for number in (7, 8)
    ]
    gpu.log()
    gpu.trouble(1, 2)
    for number, work in zip((7, 8), works, strict=True):
        with pytest.raises(comm_core.NcclError) as caught:
            work.wait(10)
        assert caught.value.code == 2
        assert str(caught.value) == (
            f"reduce_scatter 'bucket {number}' (4 x float32, rank 1 of 2 on nccl-world): rank 1 of 2 was told by NCCL: "
            "system error (NCCL code 2), the cable is out"
        )
    assert isinstance(works[0].exception(), comm_core.NcclError)
    eventually(lambda: any(line.startswith("abort") for line in gpu.log()))
    with pytest.raises(
        comm_core.NcclError, match=r"aborted after an error: rank 1 of 2 was told by NCCL: system error"
    ):
        comms[1].all_reduce_async(gpu.memory(a, 1), gpu.memory(a, 1))
    with pytest.raises(comm_core.NcclError, match="aborted after an error"):
        comms[1].split(0)
    assert comms[1].pending() == []


def test_what_other_ranks_never_issue_can_be_given_up(gpu: Double) -> None:
    comms = gpu.world(2)
    a = np.ones(4, np.float32)
    work = comms[0].all_reduce_async(gpu.memory(a, 0), gpu.memory(a, 0), label="alone")
    gpu.log()
    comms[0].abandon()
    with pytest.raises(comm_core.TransportError, match=r"all_reduce 'alone'.*given up: other ranks never issued it"):
        work.wait(10)
    eventually(lambda: any(line.startswith("abort") for line in gpu.log()))
    comms[0].close()


def test_a_call_that_fails_fails_the_communicator(gpu: Double) -> None:
    comms = gpu.world(2)
    a, b = np.ones(3, np.float32), np.zeros(2, np.float32)
    earlier = comms[0].all_reduce_async(gpu.memory(a, 0), gpu.memory(a, 0), label="earlier")
    gpu.fail("ncclReduce", 3)
    with pytest.raises(
        comm_core.NcclError, match=r"^reduce_scatter 'b' .*rank 0 of 2.*: ncclReduce: error .NCCL code 3"
    ):
        comms[0].reduce_scatter_async(gpu.memory(a, 0), gpu.memory(b, 0), label="b")
    assert "end of group" in gpu.log(), "the group was ended, or this thread could issue nothing more"
    with pytest.raises(comm_core.NcclError, match="'earlier'"):
        earlier.wait(10)
    assert comms[0].pending() == []


def test_a_device_that_fails_is_told_as_such(gpu: Double) -> None:
    (comm,) = gpu.world(1)
    a = np.ones(4, np.float32)
    work = comm.all_reduce_async(gpu.memory(a, 0), gpu.memory(a, 0), label="g")
    gpu.fail("cuEventQuery", 700)
    with pytest.raises(comm_core.CudaError, match=r"all_reduce 'g' .*cuEventQuery: illegal address") as caught:
        work.wait(10)
    assert caught.value.code == 700


def _stuck(gpu: Double, comm: comm_core.Communicator) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that waits inside NCCL until somebody frees it, and where it then puts its error."""
    a = np.ones(4, np.float32)
    gpu.hang("ncclAllReduce")
    seen: list[BaseException] = []

    def call() -> None:
        try:
            comm.all_reduce_async(gpu.memory(a, 0), gpu.memory(a, 0), label="stuck")
        except comm_core.Error as error:
            seen.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    eventually(lambda: "'stuck'" in " ".join(work.describe() for work in comm.pending()))
    return thread, seen


def test_a_caller_stuck_in_nccl_is_freed_by_the_abort(gpu: Double) -> None:
    comms = gpu.world(2)
    thread, seen = _stuck(gpu, comms[0])
    gpu.trouble(0, 6)
    thread.join(20)
    assert not thread.is_alive()
    assert isinstance(seen[0], comm_core.NcclError)


def test_a_caller_stuck_in_nccl_can_be_given_up_by_another_thread(gpu: Double) -> None:
    """As where a first collective connects to a rank that will not come."""
    comms = gpu.world(2)
    (stuck, seen), helper = _stuck(gpu, comms[0]), threading.Thread(target=comms[0].abandon)
    helper.start()
    try:
        helper.join(10)
        assert not helper.is_alive()
        stuck.join(20)
        assert not stuck.is_alive()
    finally:
        gpu.trouble(0, 6)  # frees it, whatever went wrong
        stuck.join()
        helper.join()
    assert isinstance(seen[0], comm_core.NcclError)
    with pytest.raises(comm_core.TransportError, match="aborted after an error: given up"):
        comms[0].barrier_async()


def test_what_nccl_cannot_do_is_refused_before_anything_is_enqueued(gpu: Double) -> None:
    comms = gpu.world(2)
    comm = comms[0]
    halves, floats = np.zeros(4, np.int16), np.zeros(4, np.float32)
    stream = gpu.stream()
    refusals: list[tuple[str, Callable[[], object]]] = [
        ("does not reduce int16", lambda: comm.all_reduce(gpu.memory(halves, 0), gpu.memory(halves, 0))),
        ("reduce with sum", lambda: comm.all_reduce(gpu.memory(floats, 0), gpu.memory(floats, 0), ReduceOp.AVG)),
        ("tag is 3", lambda: comm.send(gpu.memory(floats, 0), 1, 3)),
        ("cannot message itself", lambda: comm.send(gpu.memory(floats, 0), 0)),
        ("no mailbox", lambda: comm.post(1, b"letter")),
        ("no mailbox", lambda: comm.receive_post(0)),
        ("moves no host memory", lambda: comm.all_gather_counts(3)),
    ]
    for message, call in refusals:
        with pytest.raises(comm_core.Unsupported, match=message):
            call()
    gpu.capture(stream, True)
    with pytest.raises(comm_core.Unsupported, match="CUDA graph"):
        comm.all_reduce(gpu.memory(floats, 0, stream), gpu.memory(floats, 0, stream))
    gpu.capture(stream, False)
    for buffer, place in ((floats, "in host memory"), (gpu.memory(floats, 1), "on CUDA device 1")):
        with pytest.raises(comm_core.InvalidUsage, match=f"buffer is {place} but .* on CUDA device 0"):
            comm.broadcast(buffer)
    with pytest.raises(comm_core.InvalidUsage, match=r"buffer is on CUDA device 0 but .* in host memory"):
        comm_core.local().broadcast(gpu.memory(floats, 0))
    with pytest.raises(comm_core.InvalidUsage, match="a stream belongs to a device"):
        Buffer(floats.ctypes.data, 4, DType.FLOAT32, stream=stream)
    assert gpu.log() == []
    assert comm.pending() == []
