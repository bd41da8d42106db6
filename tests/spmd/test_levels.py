"""Communicators that know groups of ranks, against what torch computes from all ranks' data at once."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from zlib import crc32

import pytest
import torch

from comm_core import InvalidUsage, ReduceOp, TransportError, Unsupported
from overlap.job.session import init
from overlap.transport import objects
from overlap.transport.communicator import Communicator, Work
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

_GLOO = os.environ.get("DEAR_TRANSPORT") == "gloo"
pytestmark = [
    pytest.mark.four_ranks,
    pytest.mark.skipif(_GLOO, reason="over gloo there are no groups of ranks"),
]

Groups = list[list[int]]
Made = list[tuple[Groups, Communicator, Communicator]]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64, torch.uint8, torch.bool]
OPS = [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PROD, ReduceOp.AVG]
#: Small ones go at once; the large ones in several pieces, and unevenly.
COUNTS = [0, 1, 7, 70_001]
LARGE = 600_001


def partitions(size: int) -> list[Groups]:
    """Groups of every size: ranks that follow one another, every other rank, and some order."""
    found: list[Groups] = []
    for members in range(1, size + 1):
        if size % members:
            continue
        ranks = list(range(size))
        found.append([ranks[i : i + members] for i in range(0, size, members)])
        if 1 < members < size:
            found.append([ranks[i :: size // members] for i in range(size // members)])
            random.Random(size).shuffle(ranks)
            found.append([ranks[i : i + members] for i in range(0, size, members)])
    return found


@pytest.fixture
def comm() -> Communicator:
    return init().comm


@pytest.fixture(scope="module")
def made() -> Iterator[Made]:
    """For every partition, a communicator of either kind; closed after the last test, as those of a session are."""
    comm = init().comm
    communicators = [(groups, comm.two_level(groups), comm.hybrid(groups)) for groups in partitions(comm.size)]
    yield communicators
    for _, two_level, hybrid in communicators:
        two_level.close()
        hybrid.close()


def _rows(size: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What every rank contributes, small whole numbers: exact in every type."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 3, (size, count), generator=generator).to(dtype)


def _expected(rows: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    wide = rows.double() if rows.dtype.is_floating_point else rows.long()
    if op is ReduceOp.AVG:
        wide = wide.sum(0) / len(rows)
    elif op is ReduceOp.SUM:
        wide = wide.sum(0)
    elif op is ReduceOp.PROD:
        wide = wide.prod(0)
    elif rows.numel():
        wide = wide.amin(0) if op is ReduceOp.MIN else wide.amax(0)
    else:
        wide = wide[0]
    return wide.to(rows.dtype)


def _same(got: torch.Tensor, expected: torch.Tensor, op: ReduceOp) -> bool:
    """Averages over three ranks are no exact numbers."""
    if op is ReduceOp.AVG:
        return torch.allclose(got.double(), expected.double(), rtol=4 * torch.finfo(got.dtype).eps)
    return torch.equal(got, expected)


def _uneven(count: int, parts: int, seed: int) -> list[int]:
    """Some of them empty."""
    cuts = sorted(random.Random(seed).randint(0, count) for _ in range(parts - 1))
    return [end - start for start, end in zip([0, *cuts], [*cuts, count], strict=True)]


def _check_scattered(
    comm: Communicator, rows: torch.Tensor, expected: torch.Tensor, op: ReduceOp, counts: list[int] | None
) -> None:
    count, mine = rows.shape[1], rows[comm.rank].clone()
    shares = counts or [len(part) for part in torch.arange(count).tensor_split(comm.shard_size)]
    shard = torch.empty(shares[comm.shard_rank], dtype=rows.dtype)
    comm.run(reduce_scatter(mine, shard, op, counts=counts))
    assert _same(shard, expected.split(shares)[comm.shard_rank], op)
    assert torch.equal(mine, rows[comm.rank])  # never writes its input


def _check_gathered(comm: Communicator, owners: list[int], count: int, dtype: torch.dtype, counts: list[int]) -> None:
    parts = [_rows(1, n, dtype)[0] + owner for n, owner in zip(counts, owners, strict=True)]
    expected, whole = torch.cat(parts), torch.zeros(count, dtype=dtype)
    comm.run(all_gather(parts[comm.shard_rank], whole, counts=counts))
    assert torch.equal(whole, expected)
    inside = torch.zeros(count, dtype=dtype)
    own = inside.split(counts)[comm.shard_rank]
    own.copy_(parts[comm.shard_rank])
    comm.run(all_gather(own, inside, counts=counts))
    assert torch.equal(inside, expected)


def _check_reduced(comm: Communicator, rows: torch.Tensor, expected: torch.Tensor, op: ReduceOp) -> None:
    mine = rows[comm.rank].clone()
    whole = torch.empty_like(mine)
    comm.run(all_reduce(mine, whole, op))
    assert _same(whole, expected, op)
    assert torch.equal(mine, rows[comm.rank])
    comm.run(all_reduce(mine, mine, op))
    assert torch.equal(mine, whole)


def _own(groups: Groups, rank: int) -> list[int]:
    return next(group for group in groups if rank in group)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(made: Made, dtype: torch.dtype, op: ReduceOp) -> None:
    """Two levels give what one gives; shards of groups are reduced over all ranks."""
    for groups, two_level, hybrid in made:
        rank, size, group = two_level.rank, two_level.size, _own(groups, two_level.rank)
        assert (two_level.shard_rank, two_level.shard_size) == (rank, size)
        assert (hybrid.shard_rank, hybrid.shard_size) == (group.index(rank), len(group))
        for comm in (two_level, hybrid):
            if op is ReduceOp.AVG and not dtype.is_floating_point:
                with pytest.raises(Unsupported):
                    comm.prepare(all_reduce(torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype), op))
                continue
            for count in [*COUNTS, *([LARGE] if op is ReduceOp.SUM and dtype.is_floating_point else [])]:
                rows = _rows(size, count, dtype)
                expected = _expected(rows, op)
                _check_scattered(comm, rows, expected, op, None)
                _check_scattered(comm, rows, expected, op, _uneven(count, comm.shard_size, count))
                _check_reduced(comm, rows, expected, op)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_gathers(made: Made, dtype: torch.dtype) -> None:
    """Two levels gather in the order of ranks; shards are gathered within groups."""
    for groups, two_level, hybrid in made:
        for comm, owners in ((two_level, list(range(two_level.size))), (hybrid, _own(groups, hybrid.rank))):
            for count in [*COUNTS, LARGE]:
                balanced = [len(part) for part in torch.arange(count).tensor_split(comm.shard_size)]
                for counts in (balanced, _uneven(count, comm.shard_size, count), [0] * (len(owners) - 1) + [count]):
                    _check_gathered(comm, owners, count, dtype, counts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_all_ranks_get_the_same_bits(made: Made, dtype: torch.dtype) -> None:
    """Whatever the rounding; and again the next time."""
    world = init().comm
    for _, two_level, hybrid in made:
        for count in (1000, LARGE):
            values = torch.randn(count, generator=torch.Generator().manual_seed(world.rank)).to(dtype)
            whole, again = torch.empty_like(values), torch.empty_like(values)
            counts = _uneven(count, hybrid.shard_size, 3)
            shard = torch.empty(counts[hybrid.shard_rank], dtype=dtype)
            for comm in (two_level, hybrid):
                comm.run(all_reduce(values, whole, ReduceOp.AVG))
                comm.run(all_reduce(values, again, ReduceOp.AVG))
                assert torch.equal(whole, again)
                found = objects.allgather_object(world, crc32(whole.numpy().tobytes()))
                assert all(one == found[0] for one in found)
            hybrid.run(reduce_scatter(values, shard, counts=counts))
            shards = objects.allgather_object(world, (hybrid.shard_rank, crc32(shard.numpy().tobytes())))
            assert len(set(shards)) == hybrid.shard_size


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp32_stands_beside_16_bits(made: Made, dtype: torch.dtype) -> None:
    for _, *both in made:
        for comm in both:
            for count in (13, 70_001):
                counts = _uneven(count, comm.shard_size, count)
                everything = _rows(comm.size, count, torch.float32) + 1 / 3
                rounded, exact = everything.to(dtype), everything[comm.rank].clone()
                send, recv = torch.empty(count, dtype=dtype), torch.empty(counts[comm.shard_rank], dtype=dtype)
                into = torch.zeros(len(recv))
                comm.run(reduce_scatter(send, recv, counts=counts, wide=Wide(exact, into)))
                assert torch.equal(send, rounded[comm.rank])
                assert torch.equal(into, recv.float())
                whole, wide_whole = torch.empty(count, dtype=dtype), torch.empty(count)
                comm.run(all_gather(recv, whole, counts=counts, wide=Wide(into, wide_whole)))
                assert torch.equal(wide_whole, whole.float())
                assert torch.allclose(wide_whole, rounded.float().sum(0), rtol=4 * torch.finfo(dtype).eps)


def test_everything_else_is_over_all_ranks(made: Made) -> None:
    for _, *both in made:
        for comm in both:
            size, rank, root = comm.size, comm.rank, comm.size - 1
            told = torch.full((70_001,), float(rank))
            comm.run(broadcast(told, root))
            assert torch.all(told == root)
            ahead, swapped = torch.full((2 * size,), rank), torch.empty(2 * size, dtype=torch.int64)
            comm.run(all_to_all(ahead, swapped))
            assert swapped.tolist() == [peer for peer in range(size) for _ in range(2)]
            at_root = torch.zeros(3, dtype=torch.int64)
            comm.run(reduce(torch.ones(3, dtype=torch.int64), at_root if rank == root else None, root=root))
            assert rank != root or at_root.tolist() == [size] * 3
            comm.run(barrier())
            comm.post(rank, b"to myself").wait()
            assert comm.receive_post(5) == (rank, b"to myself")
            assert comm.pending() == []


def test_what_is_split_off_has_no_groups(made: Made) -> None:
    _, _, hybrid = made[0]
    part = hybrid.split(0, hybrid.rank)
    assert part is not None
    assert (part.shard_rank, part.shard_size) == (part.rank, part.size)
    _check_gathered(part, list(range(part.size)), 70_001, torch.float32, _uneven(70_001, part.size, 1))
    part.close()
    again = hybrid.two_level([list(range(hybrid.size))])
    _check_gathered(again, list(range(again.size)), 70_001, torch.float32, _uneven(70_001, again.size, 1))
    again.close()


def test_persistent_operations(made: Made) -> None:
    count = 70_001
    for _, *both in made:
        for comm in both:
            counts = _uneven(count, comm.shard_size, 5)
            mine, whole, gathered = torch.empty(count), torch.empty(count), torch.empty(count)
            shard = torch.empty(counts[comm.shard_rank])
            starts = [
                comm.prepare(reduce_scatter(mine, shard, counts=counts, label="shard")),
                comm.prepare(all_gather(shard, gathered, counts=counts)),
                comm.prepare(all_reduce(mine, whole, ReduceOp.MAX)),
            ]
            issued = comm.issued
            for step in range(3):
                rows = _rows(comm.size, count, torch.float32) + step
                mine.copy_(rows[comm.rank])
                works = [start() for start in starts]  # in this order, like any operations
                for work in works:
                    work.wait()
                assert works[0].label == "shard"
                assert torch.equal(gathered, rows.sum(0))
                assert torch.equal(whole, rows.amax(0))
            assert comm.issued == issued + 9


def test_what_is_under_way_is_told(made: Made) -> None:
    world = init().comm
    if world.size == 1:
        pytest.skip("a rank alone waits for nobody")
    for _, *both in made:
        for comm in both:
            values = torch.ones(70_001)
            if comm.rank == 0:
                world.run(barrier())
                comm.run(all_reduce(values, values))
            else:
                work = comm.start(all_reduce(values, values, label="late"))
                assert [one.label for one in comm.pending()] == ["late"]
                assert f"on {comm.name}" in work.describe()
                assert comm.lines()[comm.name].unfinished == ("all_reduce",)
                world.run(barrier())
                work.wait()
            assert comm.pending() == []


def test_names_and_wrong_counts(made: Made) -> None:
    world = init().comm
    for _, two_level, hybrid in made:
        assert two_level.name.endswith(":two_level")
        assert hybrid.name.endswith(":hybrid")
        assert {two_level.backend, hybrid.backend} == {world.backend}
        assert set(objects.allgather_object(world, hybrid.name)) == {hybrid.name}
        wrong = [1] * (hybrid.shard_size + 1)
        with pytest.raises(InvalidUsage, match=f"counts has {len(wrong)} entries for {hybrid.shard_size}"):
            hybrid.prepare(reduce_scatter(torch.empty(len(wrong)), torch.empty(1), counts=wrong))


def test_groups_that_are_no_partition_are_refused_on_every_rank() -> None:
    comm = init().comm
    ranks = list(range(comm.size))
    mistakes = {
        f"leave out rank {comm.size - 1}": [ranks[:-1]],
        "name rank 0 twice": [[*ranks, 0]],
        f"name rank {comm.size}, which there is not": [[*ranks, comm.size]],
        f"have {comm.size} ranks and 0": [ranks, []],
    }
    if comm.size > 2:
        mistakes[f"have {comm.size - 1} ranks and 1"] = [ranks[:-1], ranks[-1:]]
    for words, groups in mistakes.items():
        for make in (comm.two_level, comm.hybrid):
            with pytest.raises(InvalidUsage, match=words) as caught:
                make(groups)
            messages = objects.allgather_object(comm, str(caught.value))
            assert set(messages) == {messages[0]}


def test_ranks_that_disagree_about_groups_all_hear_of_it() -> None:
    comm = init().comm
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    last = comm.size - 1
    ranks = list(range(comm.size))
    mine = [[rank] for rank in ranks] if comm.rank == last else [ranks]
    with pytest.raises(InvalidUsage, match=f"rank {last} for two_level"):
        comm.two_level(mine)
    make = comm.hybrid if comm.rank == last else comm.two_level
    with pytest.raises(InvalidUsage, match=rf"rank 0 asks for two_level\(.*\) and rank {last} for hybrid"):
        make([ranks])
    assert objects.allgather_object(comm, comm.rank) == ranks


def test_another_operation_of_another_rank_is_told() -> None:
    """And ends the communicator, as it ends any."""
    comm = init().comm
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    middle = comm.size // 2 if comm.size % 2 == 0 else comm.size
    made = comm.two_level([list(range(start, start + middle)) for start in range(0, comm.size, middle)])
    values = torch.ones(70_001)
    op = ReduceOp.MAX if made.rank == 0 else ReduceOp.SUM
    with pytest.raises(TransportError, match="expected all_reduce of float32, op"):
        made.run(all_reduce(values, values, op))
    made.abandon()
    made.close()


def test_random_operations(made: Made) -> None:
    """Issued in one order, several of them under way; every rank waits when it likes."""
    draw, own = random.Random(7), random.Random(made[0][1].rank)
    under_way: list[tuple[Work, torch.Tensor, torch.Tensor, ReduceOp]] = []

    def settle(place: int) -> None:
        work, got, wanted, op = under_way.pop(place)
        work.wait(30)
        assert _same(got, wanted, op)

    for number in range(500):
        groups, *both = made[draw.randrange(len(made))]
        comm = both[draw.randrange(2)]
        owners = list(range(comm.size)) if comm is both[0] else _own(groups, comm.rank)
        count = 400_000 if number % 25 == 0 else draw.choice([0, 1, 5, 700, 9_000, 60_000])
        dtype, op = draw.choice([torch.float16, torch.float32, torch.int32]), draw.choice(OPS[:3])
        kind, counts = draw.choice(list("sgr")), _uneven(count, comm.shard_size, number)
        rows = _rows(comm.size, count, dtype) + number % 5
        wanted, got = _expected(rows, op), torch.empty(count, dtype=dtype)
        if kind == "s":
            wanted, got = wanted.split(counts)[comm.shard_rank], got[: counts[comm.shard_rank]]
            work = comm.start(reduce_scatter(rows[comm.rank], got, op, counts=counts))
        elif kind == "r":
            work = comm.start(all_reduce(rows[comm.rank], got, op))
        else:
            parts = [rows[owner].split(counts)[i] for i, owner in enumerate(owners)]
            wanted = torch.cat(parts)
            work = comm.start(all_gather(parts[comm.shard_rank], got, counts=counts))
        under_way.append((work, got, wanted, op))
        while under_way and (own.random() < 0.3 or len(under_way) > 20):
            settle(own.randrange(len(under_way)))
    while under_way:
        settle(0)
