"""Every operation, element type, operator and size against numpy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from comm_core import Communicator, DType, ReduceOp, Unsupported
from tests.comm_core.reference import (
    FLOATING,
    NUMPY,
    Array,
    assert_equal,
    balanced,
    narrow,
    random_array,
    reduced,
    widen,
    zeros,
)

# Below, at and above the limits of the single-step algorithms (32 KB) and of a window of segments (8 x 60 KB).
COUNTS = [0, 1, 2, 3, 7, 1000, 20_011, 300_007]
PAIRS = [(d, op) for d, op in itertools.product(DType, ReduceOp) if op is not ReduceOp.AVG or d in FLOATING]
pytestmark = pytest.mark.filterwarnings("ignore:overflow")


def _inputs(comm: Communicator, dtype: DType, count: int) -> list[Array]:
    return [random_array(dtype, count, seed=17 * count + rank) for rank in range(comm.size)]


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda x: x.name)
def test_reductions_of_every_type_and_operator(comm: Communicator, dtype: DType, op: ReduceOp) -> None:
    for count in (5, 40_003):
        inputs = _inputs(comm, dtype, count)
        expected = reduced(inputs, op)
        mine = inputs[comm.rank]
        before = mine.raw.copy()

        everything = zeros(dtype, count)
        comm.all_reduce(mine.buffer(), everything.buffer(), op)
        assert_equal(everything, expected, op, comm.size)

        counts = balanced(count, comm.size)
        chunk = zeros(dtype, counts[comm.rank])
        comm.reduce_scatter(mine.buffer(), chunk.buffer(), op)
        first = sum(counts[: comm.rank])
        assert_equal(chunk, expected[first : first + counts[comm.rank]], op, comm.size)

        root = comm.size - 1
        result = zeros(dtype, count)
        comm.reduce(mine.buffer(), result.buffer() if comm.rank == root else None, op, root)
        if comm.rank == root:
            assert_equal(result, expected, op, comm.size)
        assert mine.raw.tobytes() == before.tobytes(), "an input was written"


@pytest.mark.parametrize("dtype", [d for d in DType if d not in FLOATING], ids=lambda x: x.name)
def test_average_needs_a_floating_type(comm: Communicator, dtype: DType) -> None:
    a, b = zeros(dtype, 3), zeros(dtype, 3)
    with pytest.raises(Unsupported, match="avg"):
        comm.all_reduce(a.buffer(), b.buffer(), ReduceOp.AVG)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.INT64], ids=lambda x: x.name)
def test_counts_of_all_sizes(comm: Communicator, dtype: DType, count: int) -> None:
    inputs = _inputs(comm, dtype, count)
    expected = reduced(inputs, ReduceOp.SUM)
    result = zeros(dtype, count)
    comm.all_reduce(inputs[comm.rank].buffer(), result.buffer())
    assert_equal(result, expected, ReduceOp.SUM, comm.size)

    in_place = Array(inputs[comm.rank].raw.copy(), dtype)
    comm.all_reduce(in_place.buffer(), in_place.buffer())
    assert in_place.raw.tobytes() == result.raw.tobytes()

    counts = balanced(count, comm.size)
    chunk = zeros(dtype, counts[comm.rank])
    comm.reduce_scatter(inputs[comm.rank].buffer(), chunk.buffer())
    gathered = zeros(dtype, count)
    comm.all_gather(chunk.buffer(), gathered.buffer())
    assert_equal(gathered, expected, ReduceOp.SUM, comm.size)

    for root in range(comm.size):
        copy = Array(inputs[comm.rank].raw.copy(), dtype)
        comm.broadcast(copy.buffer(), root)
        assert copy.raw.tobytes() == inputs[root].raw.tobytes()
        comm.reduce(inputs[comm.rank].buffer(), copy.buffer(), root=root)
        if comm.rank == root:
            assert_equal(copy, expected, ReduceOp.SUM, comm.size)


def _uneven(comm: Communicator, kind: str) -> list[int]:
    return {
        "ramp": [30_000 * rank + 1 for rank in range(comm.size)],
        "first only": [90_001] + [0] * (comm.size - 1),
        "last only": [0] * (comm.size - 1) + [350_001],
        "holes": [0 if rank % 2 else 200_000 for rank in range(comm.size)],
        "small": [rank % 3 for rank in range(comm.size)],
        "steep": [400_000 if rank == 0 else 1 for rank in range(comm.size)],
    }[kind]


@pytest.mark.parametrize("kind", ["ramp", "first only", "last only", "holes", "small", "steep"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16], ids=lambda x: x.name)
def test_unequal_chunks(comm: Communicator, kind: str, dtype: DType) -> None:
    counts = _uneven(comm, kind)
    total, first = sum(counts), sum(counts[: comm.rank])
    inputs = _inputs(comm, dtype, total)
    expected = reduced(inputs, ReduceOp.SUM)
    chunk = zeros(dtype, counts[comm.rank])
    comm.reduce_scatter(inputs[comm.rank].buffer(), chunk.buffer(), counts=counts)
    assert_equal(chunk, expected[first : first + counts[comm.rank]], ReduceOp.SUM, comm.size)

    assert comm.all_gather_counts(chunk.raw.size) == counts
    whole = zeros(dtype, total)
    comm.all_gather(chunk.buffer(), whole.buffer(), counts=counts)
    assert_equal(whole, expected, ReduceOp.SUM, comm.size)

    place = zeros(dtype, total)
    place.raw[first : first + counts[comm.rank]] = chunk.raw
    comm.all_gather(place.raw[first : first + counts[comm.rank]], place.raw, counts=counts)
    assert place.raw.tobytes() == whole.raw.tobytes()


@pytest.mark.parametrize("part", [0, 1, 1000, 100_003])
def test_all_to_all(comm: Communicator, part: int) -> None:
    send = np.concatenate([np.full(part, 1000 * comm.rank + peer, np.int32) for peer in range(comm.size)])
    recv = np.zeros_like(send)
    comm.all_to_all(send, recv)
    expected = np.concatenate([np.full(part, 1000 * peer + comm.rank, np.int32) for peer in range(comm.size)])
    np.testing.assert_array_equal(recv, expected)

    # Rank r sends r + 2 p parts to p.
    send_counts = [part * (comm.rank + 2 * peer) for peer in range(comm.size)]
    recv_counts = [part * (peer + 2 * comm.rank) for peer in range(comm.size)]
    send = np.repeat(np.arange(comm.size, dtype=np.int16) + 10 * comm.rank, send_counts)
    recv = np.zeros(sum(recv_counts), np.int16)
    comm.all_to_all(send, recv, send_counts=send_counts, recv_counts=recv_counts)
    expected = np.repeat(10 * np.arange(comm.size, dtype=np.int16) + comm.rank, recv_counts)
    np.testing.assert_array_equal(recv, expected)


def test_send_and_recv(comm: Communicator) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (0, 1, 5000, 500_001):
        out, into = np.full(count, comm.rank, np.float64), np.zeros(count)
        # Everybody sends first: a send may wait for its receive without holding up anything else.
        sends = [comm.send_async(out, right, tag) for tag in (0, 1023)]
        comm.barrier()
        receives = [comm.recv_async(into, left, tag) for tag in (1023, 0)]
        for work in sends + receives:
            work.wait(30)
        np.testing.assert_array_equal(into, np.full(count, left))


def test_operations_overlap_and_keep_their_order(comm: Communicator) -> None:
    other = comm.split(0)
    assert other is not None
    count = 50_000
    arrays = [np.full(count, i + comm.rank, np.float64) for i in range(12)]
    works = [(comm, other)[i % 2].all_reduce_async(a, a, label=f"b{i}") for i, a in enumerate(arrays)]
    tiny = [comm.barrier_async() for _ in range(20)]
    for work in reversed(works + tiny):
        work.wait(30)
    for i, array in enumerate(arrays):
        assert array[0] == array[-1] == comm.size * i + sum(range(comm.size))
    assert [w.label for w in works] == [f"b{i}" for i in range(12)]
    assert all(w.done() and w.exception() is None and w.seconds > 0 for w in works)
    other.close()


def test_zeros_have_the_signs_that_addition_gives_them(comm: Communicator) -> None:
    """The sum of -0.0 of all ranks is -0.0, any +0.0 makes it +0.0, and an average has the sign of its sum."""
    kinds: list[Any] = [np.float16, np.float32, np.float64]
    for count, dtype in itertools.product((4, 30_000), kinds):
        data = np.full(count, -0.0, dtype)
        if comm.rank == 0:
            data[1] = 0.0
        tiny = np.finfo(dtype).smallest_subnormal
        if comm.rank == comm.size - 1:
            data[2] = -tiny
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            result = np.ones_like(data)
            comm.all_reduce(data, result, op)
            signs = np.signbit(result)
            assert signs[0]
            assert signs[3]
            assert result[0] == 0
            assert not signs[1]
            assert result[1] == 0
            assert signs[2]
            assert result[2] == (0 if op is ReduceOp.AVG and comm.size > 1 else -tiny)


def test_average_is_the_sum_times_the_inverse(comm: Communicator) -> None:
    data = np.random.default_rng(comm.rank).standard_normal(30_000).astype(np.float32)
    total, mean = np.empty_like(data), np.empty_like(data)
    comm.all_reduce(data, total)
    comm.all_reduce(data, mean, ReduceOp.AVG)
    np.testing.assert_array_equal(mean, total * np.float32(1 / np.float32(comm.size)))


def test_special_values_travel(comm: Communicator) -> None:
    for dtype in (np.float16, np.float32, np.float64):
        data = np.array([np.inf, -np.inf, np.nan, np.finfo(dtype).max, np.finfo(dtype).tiny], dtype)
        for op in (ReduceOp.MIN, ReduceOp.MAX):
            result = np.zeros_like(data)
            comm.all_reduce(data, result, op)
            np.testing.assert_array_equal(result, data)
        one_nan = np.ones(3, dtype)
        if comm.rank == comm.size - 1:
            one_nan[1] = np.nan
        for op in ReduceOp:
            result = np.zeros_like(one_nan)
            comm.all_reduce(one_nan, result, op)
            assert np.isnan(result[1])
            assert not np.isnan(result[0])


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=lambda x: x.name)
@pytest.mark.parametrize("dtype", FLOATING, ids=lambda x: x.name)
def test_a_nan_of_any_rank_is_the_least_and_the_greatest(comm: Communicator, dtype: DType, op: ReduceOp) -> None:
    """Every rank has its own at some places, beside infinities and other numbers; at the rest nobody has one."""
    count = 40_003
    inputs = [random_array(dtype, count, seed=rank) for rank in range(comm.size)]
    infinity, nan = (np.array([value], np.float32) for value in (np.inf, np.nan))
    to_raw = narrow if dtype is DType.BFLOAT16 else lambda values: values.astype(NUMPY[dtype])
    for rank, array in enumerate(inputs):
        array.raw[::3], array.raw[1::3] = to_raw(infinity), to_raw(-infinity)
        array.raw[rank :: comm.size + 1] = to_raw(nan)
    expected = np.arange(count) % (comm.size + 1) < comm.size
    counts = balanced(count, comm.size)
    first, last = sum(counts[: comm.rank]), sum(counts[: comm.rank + 1])
    mine, chunk, whole = inputs[comm.rank], zeros(dtype, last - first), zeros(dtype, count)
    comm.reduce_scatter(mine.buffer(), chunk.buffer(), op)
    np.testing.assert_array_equal(_is_nan(chunk), expected[first:last])
    comm.all_reduce(mine.buffer(), whole.buffer(), op)
    np.testing.assert_array_equal(_is_nan(whole), expected)
    for root in range(comm.size):
        result = zeros(dtype, 5)
        few = Array(mine.raw[:5].copy(), dtype)
        comm.reduce(few.buffer(), result.buffer() if comm.rank == root else None, op, root)
        assert comm.rank != root or _is_nan(result).tolist() == expected[:5].tolist()


def _is_nan(array: Array) -> np.ndarray:
    return np.isnan(widen(array.raw) if array.dtype is DType.BFLOAT16 else array.raw)


def test_float16_rounds_as_numpy_does(comm: Communicator) -> None:
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    every = every[~np.isnan(every)]
    result = np.empty_like(every)
    comm.all_reduce(every, result)
    with np.errstate(over="ignore"):
        expected = (every.astype(np.float32) * comm.size).astype(np.float16)
    assert result.tobytes() == expected.tobytes()


def test_half_sums_do_not_depend_on_the_cut(comm: Communicator) -> None:
    data = random_array(DType.FLOAT16, 100_000, comm.rank).raw
    whole = np.empty_like(data)
    comm.all_reduce(data, whole)
    for first, last in ((0, 100), (100, 40_000), (40_000, 100_000)):
        part = np.empty(last - first, np.float16)
        comm.all_reduce(data[first:last], part)
        assert part.tobytes() == whole[first:last].tobytes()


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(comm: Communicator) -> None:
    count = 2**31 + 5
    data = np.full(count, comm.rank + 1, np.int8)
    data[-1] = 7
    comm.all_reduce(data, data)
    assert data[0] == data[2**31] == sum(range(1, comm.size + 1))
    assert data[-1] == np.int8(7 * comm.size)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_averages_are_rounded_once(comm: Communicator, kind: Any) -> None:
    """Over three ranks: a sum times a rounded third would be rounded twice."""
    part = comm.split(0 if comm.rank < 3 else None)
    if part is None:
        return
    numbers = np.random.default_rng(0).standard_normal(100_000).astype(kind)
    exact = np.float32 if kind is np.float16 else kind
    total = sum((numbers.astype(exact) for _ in range(part.size - 1)), numbers.astype(exact))
    for count in (100, 100_000):
        mine = numbers[:count].copy()
        part.all_reduce(mine, mine, ReduceOp.AVG)
        assert (mine == (total[:count] / exact(part.size)).astype(kind)).all()
    part.close()
