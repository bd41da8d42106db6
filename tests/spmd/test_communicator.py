"""Every operation of every communicator, against what torch computes from all ranks' data at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from comm_core import InvalidUsage, ReduceOp, Unsupported
from overlap.job.session import init
from overlap.transport import objects
from overlap.transport.communicator import Communicator
from overlap.transport.operation import (
    Wide,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce,
    reduce_scatter,
)

pytestmark = pytest.mark.four_ranks

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64, torch.uint8]
COUNTS = [0, 1, 7, 1000, 70_001]
Reference = Callable[[torch.Tensor], torch.Tensor]
REDUCTIONS: dict[ReduceOp, Reference] = {
    ReduceOp.SUM: lambda rows: rows.sum(0),
    ReduceOp.MIN: lambda rows: rows.amin(0),
    ReduceOp.MAX: lambda rows: rows.amax(0),
    ReduceOp.PROD: lambda rows: rows.prod(0),
}


@pytest.fixture
def comm() -> Communicator:
    return init().comm


def _rows(comm: Communicator, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What every rank contributes, small whole numbers: exact in every type."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 3, (comm.size, count), generator=generator).to(dtype)


def _balanced(count: int, size: int) -> list[int]:
    return [len(part) for part in torch.arange(count).tensor_split(size)]


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(comm: Communicator, dtype: torch.dtype, op: ReduceOp) -> None:
    for count in COUNTS:
        rows = _rows(comm, count, dtype)
        mine = rows[comm.rank].clone()
        wide = rows.double() if dtype.is_floating_point else rows.long()
        expected = (REDUCTIONS[op](wide) if count else wide[0]).to(dtype)
        shares = _balanced(count, comm.size)
        shard = torch.empty(shares[comm.rank], dtype=dtype)
        comm.run(reduce_scatter(mine, shard, op))
        assert torch.equal(shard, expected.split(shares)[comm.rank])
        assert torch.equal(mine, rows[comm.rank])  # never writes its input
        whole = torch.empty(count, dtype=dtype)
        comm.run(all_reduce(mine, whole, op))
        assert torch.equal(whole, expected)
        root = comm.size - 1
        at_root = torch.empty(count, dtype=dtype)
        comm.run(reduce(mine, at_root if comm.rank == root else None, op, root))
        if comm.rank == root:
            assert torch.equal(at_root, expected)
        comm.run(all_reduce(mine, mine, op))
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_floating_point])
def test_a_nan_of_any_rank_is_the_least_and_the_greatest(comm: Communicator, dtype: torch.dtype, op: ReduceOp) -> None:
    """Every rank has its own at some places, beside infinities and other numbers; at the rest nobody has one."""
    for count in (5, 70_001):
        rows = _rows(comm, count, dtype)
        rows[:, ::3], rows[:, 1::3] = float("inf"), float("-inf")
        for rank, row in enumerate(rows):
            row[rank :: comm.size + 1] = float("nan")
        mine, expected = rows[comm.rank].clone(), torch.arange(count) % (comm.size + 1) < comm.size
        shares = _balanced(count, comm.size)
        shard, whole = torch.empty(shares[comm.rank], dtype=dtype), torch.empty(count, dtype=dtype)
        comm.run(reduce_scatter(mine, shard, op))
        assert torch.equal(shard.isnan(), expected.split(shares)[comm.rank])
        comm.run(all_reduce(mine, whole, op))
        assert torch.equal(whole.isnan(), expected)
        for root in range(comm.size):
            at_root = torch.zeros(count, dtype=dtype)
            comm.run(reduce(mine, at_root if comm.rank == root else None, op, root))
            assert comm.rank != root or torch.equal(at_root.isnan(), expected)


def test_persistent_operations(comm: Communicator) -> None:
    count = 70_001
    shares = [0] * (comm.size - 1) + [count]
    mine, whole = torch.empty(count), torch.empty(count)
    shard, gathered = torch.empty(_balanced(count, comm.size)[comm.rank]), torch.empty(count)
    last = torch.empty(shares[comm.rank])
    scatter = comm.prepare(reduce_scatter(mine, shard, label="shard"))
    reduce_to_last = comm.prepare(reduce_scatter(mine, last, ReduceOp.AVG, counts=shares))
    gather = comm.prepare(all_gather(shard, gathered))
    reduce_whole = comm.prepare(all_reduce(mine, whole, ReduceOp.MAX))
    root, ahead = comm.size - 1, torch.empty(2 * comm.size)
    at_root, swapped, told = torch.empty(count), torch.empty(2 * comm.size), torch.empty(3)
    reduce_to_root = comm.prepare(reduce(mine, at_root if comm.rank == root else None, root=root))
    swap, tell, meet = comm.prepare(all_to_all(ahead, swapped)), comm.prepare(broadcast(told, root)), barrier()
    moves = [reduce_to_root, swap, tell, comm.prepare(meet)]
    issued = comm.issued
    for step in range(3):
        rows = _rows(comm, count, torch.float32) + step
        mine.copy_(rows[comm.rank])
        works = [scatter(), gather(), reduce_to_last(), reduce_whole()]  # in this order, like any operations
        ahead.fill_(step + comm.rank)
        told.fill_(step + comm.rank)
        works += [start() for start in moves]
        for work in works:
            work.wait()
        assert works[0].label == "shard"
        assert comm.rank != root or torch.equal(at_root, rows.sum(0))
        assert swapped.tolist() == [step + rank for rank in range(comm.size) for _ in range(2)]
        assert told.tolist() == [step + root] * 3
        assert torch.equal(gathered, rows.sum(0))
        assert torch.allclose(last, rows.mean(0)[: len(last)])
        assert torch.equal(whole, rows.amax(0))
    assert comm.issued == issued + 24
    with pytest.raises(InvalidUsage, match=r"recv of rank \d+ has 1 elements"):
        comm.prepare(reduce_scatter(mine, torch.empty(1)))
    with pytest.raises(InvalidUsage, match=r"send of rank \d+ has 0 elements"):
        comm.prepare(all_gather(torch.empty(0), gathered))
    with pytest.raises(InvalidUsage, match="recv has 1 elements"):
        comm.prepare(all_reduce(mine, torch.empty(1)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_persistent_operations_round_each_time(comm: Communicator, dtype: torch.dtype) -> None:
    if not comm.rounds:
        pytest.skip("this communicator does not round")
    count = 1000 * comm.size
    wide_send, wide_recv = torch.empty(count), torch.empty(1000)
    narrow_send, narrow_recv = torch.empty(count, dtype=dtype), torch.empty(1000, dtype=dtype)
    scatter = comm.prepare(reduce_scatter(narrow_send, narrow_recv, wide=Wide(wide_send, wide_recv)))
    whole, own = torch.empty(count), torch.empty(1000)
    narrow_whole = torch.empty(count, dtype=dtype)
    narrow_own = narrow_whole[1000 * comm.rank :][:1000]
    gather = comm.prepare(all_gather(narrow_own, narrow_whole, wide=Wide(own, whole)))
    for step in (1.0, 2.0):
        wide_send.fill_(step)
        scatter().wait()
        assert wide_recv.eq(step * comm.size).all()
        own.fill_(step + comm.rank)
        gather().wait()
        assert all(part.eq(step + rank).all() for rank, part in enumerate(whole.split(1000)))


def test_more_segments_than_a_ring_keeps_room_for(comm: Communicator) -> None:
    count = 1_000_000
    rows = torch.arange(comm.size, dtype=torch.float32)
    mine = rows[comm.rank].expand(count).clone()
    shares = _balanced(count, comm.size)
    shard = torch.empty(shares[comm.rank])
    comm.run(reduce_scatter(mine, shard))
    assert shard.eq(rows.sum()).all()
    gathered = torch.empty(count)
    comm.run(all_gather(mine[: shares[comm.rank]], gathered, counts=shares))
    assert all(part.eq(float(rank)).all() for rank, part in enumerate(gathered.split(shares)))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.complex64])
def test_moves(comm: Communicator, dtype: torch.dtype) -> None:
    for count in COUNTS:
        rows = _rows(comm, count, dtype)
        whole = rows[comm.rank].clone() if comm.rank == 0 else torch.zeros(count, dtype=dtype)
        comm.run(broadcast(whole, 0))
        assert torch.equal(whole, rows[0])
        counts = [max(0, count - 2 * rank) for rank in range(comm.size)]
        expected = torch.cat([rows[rank, : counts[rank]] for rank in range(comm.size)])
        gathered = torch.empty(sum(counts), dtype=dtype)
        comm.run(all_gather(rows[comm.rank, : counts[comm.rank]].clone(), gathered, counts=counts))
        assert torch.equal(gathered, expected)
        in_place = torch.zeros(sum(counts), dtype=dtype)
        mine = in_place.split(counts)[comm.rank]
        mine.copy_(rows[comm.rank, : counts[comm.rank]])
        comm.run(all_gather(mine, in_place, counts=counts))
        assert torch.equal(in_place, expected)


def test_all_to_all(comm: Communicator) -> None:
    send_counts = [comm.rank + peer for peer in range(comm.size)]
    send = torch.cat([torch.full((n,), 10.0 * comm.rank + peer) for peer, n in enumerate(send_counts)])
    recv = torch.empty(sum(send_counts))
    comm.run(all_to_all(send, recv, send_counts=send_counts, recv_counts=send_counts))
    expected = torch.cat([torch.full((n,), 10.0 * peer + comm.rank) for peer, n in enumerate(send_counts)])
    assert torch.equal(recv, expected)


def test_operations_run_in_the_order_of_their_issue(comm: Communicator) -> None:
    values = torch.ones(50_000)
    works = [comm.start(all_reduce(values, values, label=f"step {step}")) for step in range(5)]
    for work in works:
        work.wait()
    assert values.eq(float(comm.size) ** 5).all()
    assert works[0].label == "step 0"
    assert all(work.done() and work.exception() is None for work in works)
    assert comm.pending() == []


def test_signed_zeros_and_averages(comm: Communicator) -> None:
    for count in (5, 50_000):
        for dtype in (torch.float32, torch.bfloat16):
            nobody = torch.full((count,), -0.0, dtype=dtype)
            comm.run(all_reduce(nobody, nobody, ReduceOp.AVG))
            assert torch.signbit(nobody).all()
            somebody = torch.full((count,), 0.0 if comm.rank == 0 else -0.0, dtype=dtype)
            shares = _balanced(count, comm.size)
            shard = torch.empty(shares[comm.rank], dtype=dtype)
            comm.run(reduce_scatter(somebody, shard, ReduceOp.AVG))
            assert not torch.signbit(shard).any()
    tiny = torch.full((8,), -1.4e-45 if comm.rank == 0 else -0.0)
    comm.run(all_reduce(tiny, tiny, ReduceOp.AVG))
    assert torch.signbit(tiny).all()  # also where it is too small to be more than zero
    ranks = torch.full((3,), float(comm.rank))
    comm.run(all_reduce(ranks, ranks, ReduceOp.AVG))
    torch.testing.assert_close(ranks, torch.full((3,), (comm.size - 1) / 2))


def test_halves_do_not_depend_on_the_split(comm: Communicator) -> None:
    generator = torch.Generator().manual_seed(comm.rank)
    values = torch.randn(60_000, generator=generator).bfloat16()
    whole = torch.empty_like(values)
    comm.run(all_reduce(values, whole))
    for part, reference in zip(values.split(17_001), whole.split(17_001), strict=True):
        alone = torch.empty_like(part)
        comm.run(all_reduce(part.clone(), alone))
        assert torch.equal(alone, reference)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_who_moves_16_bits_may_round_and_widen(comm: Communicator, dtype: torch.dtype) -> None:
    """The same bits as rounding before and widening after."""
    generator = torch.Generator().manual_seed(comm.rank)
    for count in (9, 120_007):
        counts = [count - (comm.size - 1), *[1] * (comm.size - 1)] if count > 9 else _balanced(count, comm.size)
        values = torch.randn(count, generator=generator)
        values[:8] = torch.tensor([-0.0, 0.0, -1e-45, 1e-45, 1.0009765625, 7e4, float("inf"), -0.0])
        rounded = values.to(dtype)
        shard, before = torch.empty(counts[comm.rank], dtype=dtype), values.clone()
        comm.run(reduce_scatter(rounded, shard, ReduceOp.AVG, counts=counts))

        sent, received, exact = torch.empty_like(rounded), torch.empty_like(shard), torch.empty(shard.numel())
        whole, wide = torch.empty(count, dtype=dtype), torch.empty(count)
        mine = values[: shard.numel()].clone()
        start = sum(counts[: comm.rank])
        scattered = comm.start(reduce_scatter(sent, received, ReduceOp.AVG, counts=counts, wide=Wide(values, exact)))
        own = whole[start : start + shard.numel()]
        comm.run(all_gather(own, whole, counts=counts, wide=Wide(mine, wide)))
        scattered.wait()
        assert torch.equal(_bits(exact), _bits(shard.float()))
        assert torch.equal(_bits(values), _bits(before))
        everybody = torch.empty(count)
        comm.run(all_gather(mine, everybody, counts=counts))
        assert torch.equal(_bits(wide), _bits(everybody.to(dtype).float()))
        assert torch.equal(whole.float(), wide)

    half, single = torch.empty(8 * comm.size, dtype=dtype), torch.empty(8 * comm.size)
    for wide_send, wide_recv, why in (
        (single.double(), single[:8], "wide send is torch.float64 and send is"),
        (single[1:], single[:8], rf"wide send has {8 * comm.size - 1} elements, expected {8 * comm.size}"),
        (single, single[:8], "wide send shares memory with wide recv"),
    ):
        with pytest.raises(InvalidUsage, match=why):
            comm.start(reduce_scatter(half, half[:8].clone(), wide=Wide(wide_send, wide_recv)))
    comm.run(barrier())


def test_split(comm: Communicator) -> None:
    color = None if comm.rank == comm.size - 1 and comm.size > 1 else comm.rank % 2
    part = comm.split(color, key=-comm.rank)
    assert (part is None) == (color is None)
    if part is not None:
        members = [r for r in range(comm.size) if r % 2 == color and not (comm.size > 1 and r == comm.size - 1)]
        assert part.size == len(members)
        assert part.rank == sorted(members, reverse=True).index(comm.rank)
        total = torch.tensor([float(comm.rank)])
        part.run(all_reduce(total, total))
        assert float(total) == sum(members)
        part.close()
    comm.run(barrier())


def test_arguments_are_refused_before_anything_is_sent(comm: Communicator) -> None:
    good = torch.ones(8 * comm.size)
    with pytest.raises(InvalidUsage, match="contiguous"):
        comm.run(all_reduce(good[::2], good[::2]))
    with pytest.raises(InvalidUsage, match=r"expected"):
        comm.run(reduce_scatter(good, torch.empty(9)))
    with pytest.raises(InvalidUsage, match=r"dtype|float64"):
        comm.run(all_reduce(good, torch.empty(good.numel(), dtype=torch.float64)))
    with pytest.raises(InvalidUsage, match=str(comm.size)):
        comm.run(broadcast(good, comm.size))
    with pytest.raises(Unsupported):
        comm.run(all_reduce(torch.ones(4, dtype=torch.complex64), torch.ones(4, dtype=torch.complex64), ReduceOp.MAX))
    comm.run(barrier())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_inference_mode_changes_nothing(comm: Communicator, dtype: torch.dtype) -> None:
    """Tensors made there may be written nowhere else, and that holds for each thread."""
    for count in COUNTS:
        rows = _rows(comm, count, dtype)
        expected = rows.sum(0).to(dtype)
        for inside in (True, False, True):
            with torch.inference_mode(inside):
                mine = rows[comm.rank].clone()
                whole, everyone = torch.empty(count, dtype=dtype), torch.empty(comm.size * count, dtype=dtype)
                works = [
                    comm.start(all_reduce(mine, whole)),
                    comm.start(all_gather(mine, everyone)),
                ]  # one ahead of the other
                works.append(comm.start(broadcast(mine, 0)))
                for work in works:
                    work.wait()
                assert torch.equal(whole, expected)
                assert torch.equal(everyone, rows.flatten())
                assert torch.equal(mine, rows[0])
                assert objects.allgather_object(comm, comm.rank) == list(range(comm.size))
                assert objects.broadcast_object(comm, comm.rank) == 0


def test_objects_of_every_length_come_as_they_went(comm: Communicator) -> None:
    """One message holds the shorter ones; a longer one comes in two, also where only some ranks have one."""
    room = objects._FRAME - objects._LENGTH.size
    for length in (0, *range(room - 32, room + 3), 5 * room):
        theirs = [bytes([rank]) * (length if rank % 2 else 3) for rank in range(comm.size)]
        assert objects.allgather_object(comm, theirs[comm.rank]) == theirs
        for root in range(comm.size):
            mine = bytes([7]) * length if comm.rank == root else None
            assert objects.broadcast_object(comm, mine, root) == bytes([7]) * length


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_averages_of_whole_numbers_are_refused(comm: Communicator, dtype: torch.dtype) -> None:
    mine = torch.ones(2 * comm.size, dtype=dtype)
    with pytest.raises(Unsupported, match=r"(?i)avg"):
        comm.run(all_reduce(mine, mine.clone(), ReduceOp.AVG))
    with pytest.raises(Unsupported, match=r"(?i)avg"):
        comm.run(reduce_scatter(mine, mine[:2].clone(), ReduceOp.AVG))
