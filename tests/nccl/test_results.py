"""Results, with kernels that produce what is sent and consume what arrives on streams of their own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import comm_core
from comm_core import Buffer, Communicator, ReduceOp, Work
from tests.gpu_double import Double, eventually

Issue = Callable[[Communicator, Buffer, Buffer], Work]
Case = tuple[Issue, list[int], list[int], Callable[[list[np.ndarray]], list[np.ndarray]]]


def _counts(total: int, size: int) -> list[int]:
    return [total // size + (rank < total % size) for rank in range(size)]


def _case(
    name: str, size: int, total: int
) -> tuple[Issue, list[int], list[int], Callable[[list[np.ndarray]], list[np.ndarray]]]:
    """How it is issued, elements sent and received by each rank, and what should arrive of what was sent."""
    counts, root = _counts(total, size), size - 1
    skewed = [total, *[0] * (size - 1)]
    everybody, ends = [total] * size, np.cumsum(counts).tolist()

    def chunks(whole: np.ndarray, of: list[int]) -> list[np.ndarray]:
        return list(np.split(whole, np.cumsum(of)[:-1]))

    def exchanged(sent: list[np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate([part[r * counts[0] : (r + 1) * counts[0]] for part in sent]) for r in range(size)]

    cases: dict[str, Case] = {
        "reduce_scatter": (
            lambda c, a, b: c.reduce_scatter_async(a, b),
            everybody, counts, lambda sent: chunks(sum(sent), counts),
        ),
        "reduce_scatter to one": (
            lambda c, a, b: c.reduce_scatter_async(a, b, counts=skewed),
            everybody, skewed, lambda sent: chunks(sum(sent), skewed),
        ),
        "all_gather": (
            lambda c, a, b: c.all_gather_async(a, b),
            counts, everybody, lambda sent: [np.concatenate(sent)] * size,
        ),
        "all_reduce": (
            lambda c, a, b: c.all_reduce_async(a, b, ReduceOp.MAX),
            everybody, everybody, lambda sent: [np.maximum.reduce(sent)] * size,
        ),
        "reduce": (
            lambda c, a, b: c.reduce_async(a, b if c.rank == root else None, root=root),
            everybody, everybody, lambda sent: [np.zeros(total)] * (size - 1) + [sum(sent)],
        ),
        "all_to_all": (
            lambda c, a, b: c.all_to_all_async(a, b),
            [counts[0] * size] * size, [counts[0] * size] * size, exchanged,
        ),
    }  # fmt: skip
    assert ends[-1] == total
    return cases[name]


NAMES = ("reduce_scatter", "reduce_scatter to one", "all_gather", "all_reduce", "reduce", "all_to_all")


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_results_in_any_order_that_the_device_takes(name: str, size: int, gpu: Double) -> None:
    comms = gpu.world(size)
    rng = np.random.default_rng(5)
    for seed, total in enumerate([12, 7, 1, 0, 6, 12, 5, 12]):
        issue, sent, received, expected = _case(name, size, total)
        sources = [rng.integers(0, 50, count).astype(np.float32) for count in sent]
        sends = [np.full(count, np.nan, np.float32) for count in sent]
        recvs = [np.zeros(count, np.float32) for count in received]
        results = [np.full(count, np.nan, np.float32) for count in received]
        works = []
        for rank, comm in enumerate(comms):
            producer, consumer = gpu.stream(), gpu.stream()
            gpu.kernel(producer, sends[rank], sources[rank])
            works.append(issue(comm, gpu.memory(sends[rank], rank, producer), gpu.memory(recvs[rank], rank, producer)))
            works[-1].order_before(consumer)
            gpu.kernel(consumer, results[rank], recvs[rank])
        assert gpu.run(seed) == 0
        for result, wanted in zip(results, expected(sources), strict=True):
            np.testing.assert_array_equal(result, wanted)
        for work in works:
            eventually(work.done)  # the watching thread may be just about to say so
            assert work.exception() is None
    assert not [line for line in gpu.log() if "mismatch" in line]


def test_broadcast_messages_and_barriers(gpu: Double) -> None:
    comms = gpu.world(3)
    data = [np.full(5, rank, np.int64) for rank in range(3)]
    for rank, comm in enumerate(comms):
        comm.broadcast_async(gpu.memory(data[rank], rank), root=2)
    gpu.run()
    assert [array.tolist() for array in data] == [[2] * 5] * 3
    a, b = np.full(5, 7, np.int64), np.zeros(5, np.int64)
    works = [comms[0].send_async(gpu.memory(a, 0), 1), comms[1].recv_async(gpu.memory(b, 1), 0)]
    gpu.run()
    assert b.tolist() == a.tolist()
    for work in works:
        eventually(work.done)
    first = comms[0].barrier_async()
    gpu.run()
    assert not first.done(), "two ranks are missing"
    others = [comm.barrier_async() for comm in comms[1:]]
    gpu.run()
    for work in (first, *others):
        eventually(work.done)


def test_booleans_are_joined_by_or_and_and(gpu: Double) -> None:
    comms = gpu.world(2)
    values = [np.array([0, 0, 1, 1], np.bool_), np.array([0, 1, 0, 1], np.bool_)]
    for op, wanted in ((ReduceOp.SUM, [0, 1, 1, 1]), (ReduceOp.PROD, [0, 0, 0, 1])):
        results = [np.zeros(4, np.bool_) for _ in comms]
        for rank, comm in enumerate(comms):
            comm.all_reduce_async(gpu.memory(values[rank], rank), gpu.memory(results[rank], rank), op)
        gpu.run()
        assert [result.tolist() for result in results] == [wanted, wanted]


def test_a_host_that_waits_is_woken_by_the_device(gpu: Double) -> None:
    (comm,) = gpu.world(1)
    a = np.ones(4, np.float32)
    with pytest.raises(comm_core.TimeoutError, match=r"all_reduce 'x' \(4 x float32"):
        comm.all_reduce_async(gpu.memory(a, 0), gpu.memory(a, 0), label="x").wait(0.02)
    with gpu.working():
        comm.all_reduce(gpu.memory(a, 0), gpu.memory(a, 0))
        comm.barrier()
    assert comm.pending() == []


def test_split_makes_groups_of_a_colour(gpu: Double) -> None:
    comms = gpu.world(3)
    parts = gpu.split(comms, [1, None, 1])
    assert parts[1] is None
    assert parts[0] is not None
    assert parts[2] is not None
    assert [(part.rank, part.size, part.device, part.backend) for part in (parts[0], parts[2])] == [
        (0, 2, 0, "nccl"),
        (1, 2, 2, "nccl"),
    ]
