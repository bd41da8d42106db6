"""How long memory is held, and what closing gives back."""

from __future__ import annotations

import gc
import re
import time
import weakref

import numpy as np
import pytest

import comm_core
from tests.gpu_double import Double, eventually


class Owner:
    """What a buffer belongs to."""


def test_memory_is_held_until_the_device_is_done(gpu: Double) -> None:
    comms = gpu.world(2)
    a, b = np.ones(4, np.float32), np.ones(4, np.float32)
    owner = Owner()
    alive = weakref.ref(owner)
    comms[0].all_reduce_async(gpu.memory(a, 0, owner=owner), gpu.memory(a, 0))  # the work is dropped, the owner too
    del owner
    gpu.run()
    time.sleep(0.05)  # the watching thread looks, and finds the device not done
    comms[0].pending()
    gc.collect()
    assert alive() is not None, "rank 1 has not come yet, so the device still reads"
    comms[1].all_reduce_async(gpu.memory(b, 1), gpu.memory(b, 1))
    gpu.run()

    def released() -> bool:
        comms[0].pending()
        comm_core._C.release_finished()
        return alive() is None

    eventually(released)


def test_memory_of_an_aborted_operation_is_held_until_the_device_lets_go(gpu: Double) -> None:
    comms = gpu.world(2)
    a = np.ones(4, np.float32)
    producer, owner = gpu.stream(), Owner()
    alive = weakref.ref(owner)
    work = comms[0].all_reduce_async(gpu.memory(a, 0, producer, owner=owner), gpu.memory(a, 0, producer))
    del owner
    gpu.trouble(0, 6)
    with pytest.raises(comm_core.NcclError):
        work.wait(10)
    eventually(lambda: any(line.startswith("abort") for line in gpu.log()))
    comm_core._C.release_finished()
    assert alive() is not None
    gpu.run()

    def released() -> bool:
        comm_core._C.release_finished()
        return alive() is None

    eventually(released)


def test_a_graph_may_be_captured_while_operations_are_under_way(gpu: Double) -> None:
    comms = gpu.world(2)
    a, b = np.ones(4, np.float32), np.ones(4, np.float32)
    works = [comms[0].all_reduce_async(gpu.memory(a, 0), gpu.memory(a, 0))]
    stream = gpu.stream()
    gpu.capture(stream, True)
    time.sleep(0.03)  # the watching thread asks for the event
    assert not works[0].done()
    works.append(comms[1].all_reduce_async(gpu.memory(b, 1), gpu.memory(b, 1)))
    gpu.run()
    for work in works:
        work.wait(10)
    assert "a capture is spoilt" not in gpu.log()


def test_closing_waits_and_gives_everything_back(gpu: Double) -> None:
    (comm,) = gpu.world(1)
    a = np.ones(4, np.float32)
    work = comm.all_reduce_async(gpu.memory(a, 0), gpu.memory(a, 0))
    with gpu.working():
        comm.close()
    assert work.done()
    assert re.fullmatch(r"destroy c\d+", gpu.log()[-1])
    with pytest.raises(comm_core.InvalidUsage, match="is closed"):
        comm.barrier_async()


def test_a_communicator_that_failed_is_aborted_before_it_is_forgotten(gpu: Double) -> None:
    """Also where it fails and is closed between the watching thread's look at it and its next."""
    comms = gpu.world(2)
    gpu._library.double_hold(1, 1)
    try:
        eventually(lambda: bool(gpu._library.double_held()))  # it has looked at rank 0's, and asks for rank 1's
        comms[0].abandon()
        comms[0].close()
    finally:
        gpu._library.double_hold(1, 0)
    eventually(lambda: any(line.startswith("abort") for line in gpu.log()))


def test_events_are_given_back_on_threads_without_a_context(gpu: Double) -> None:
    """Whoever drops the last Work or looks at it last, such as a thread that never used the device."""
    (comm,) = gpu.world(1)
    a = np.ones(4, np.float32)
    before = gpu.alive("events")
    works = [comm.all_reduce_async(gpu.memory(a, 0), gpu.memory(a, 0)) for _ in range(3)]
    assert gpu.alive("events") == before + 3
    gpu.run()
    for work in works:
        work.wait(10)
    eventually(lambda: gpu.alive("events") == before)


def test_groups_can_be_made_after_everything_was_finalized(gpu: Double) -> None:
    """As in a notebook that calls ``dear.shutdown()`` and then ``dear.init()``."""
    values = np.arange(4, dtype=np.float32)
    (before,) = gpu.world(1)
    comm_core.finalize()
    comm_core.finalize()
    before.close()
    with pytest.raises(comm_core.Error):
        before.split(0)
    (after,) = gpu.world(1)
    got = np.zeros(4, np.float32)
    work = after.all_reduce_async(gpu.memory(values, 0), gpu.memory(got, 0))
    gpu.run()
    work.wait(10)
    assert got.tolist() == values.tolist()
