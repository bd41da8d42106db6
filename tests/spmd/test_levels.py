"""Communicators that know groups of ranks, against what torch computes from all ranks' data at once."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch

from comm_core import InvalidUsage, ReduceOp, TransportError, Unsupported
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

_GLOO = os.environ.get("DEAR_TRANSPORT") == "gloo"
pytestmark = [
    pytest.mark.four_ranks,
    pytest.mark.skipif(_GLOO, reason="over gloo there are no groups of ranks"),
]

Groups = list[list[int]]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64, torch.uint8, torch.bool]
OPS = [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PROD, ReduceOp.AVG]
#: Small ones go at once; the large ones in several pieces, and unevenly.
COUNTS = [0, 1, 7, 1000, 70_001, 1_500_001]


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


@pytest.fixture(params=range(8))
def groups(request: pytest.FixtureRequest, comm: Communicator) -> Groups:
    found = partitions(comm.size)
    if request.param >= len(found):
        pytest.skip(f"{comm.size} ranks have {len(found)} partitions")
    return found[request.param]


@pytest.fixture
def two_level(comm: Communicator, groups: Groups) -> Iterator[Communicator]:
    made = comm.two_level(groups)
    yield made
    made.close()


@pytest.fixture
def hybrid(comm: Communicator, groups: Groups) -> Iterator[Communicator]:
    made = comm.hybrid(groups)
    yield made
    made.close()


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


def _defined(dtype: torch.dtype, op: ReduceOp) -> bool:
    return op is not ReduceOp.AVG or dtype.is_floating_point


def _check_scattered(made: Communicator, rows: torch.Tensor, op: ReduceOp, counts: list[int] | None) -> None:
    count, mine = rows.shape[1], rows[made.rank].clone()
    shares = counts or [len(part) for part in torch.arange(count).tensor_split(made.shard_size)]
    shard = torch.empty(shares[made.shard_rank], dtype=rows.dtype)
    made.run(reduce_scatter(mine, shard, op, counts=counts))
    assert _same(shard, _expected(rows, op).split(shares)[made.shard_rank], op)
    assert torch.equal(mine, rows[made.rank])  # never writes its input


def _check_gathered(made: Communicator, owners: list[int], count: int, dtype: torch.dtype, counts: list[int]) -> None:
    parts = [_rows(1, n, dtype)[0] + owner for n, owner in zip(counts, owners, strict=True)]
    expected, whole = torch.cat(parts), torch.zeros(count, dtype=dtype)
    made.run(all_gather(parts[made.shard_rank], whole, counts=counts))
    assert torch.equal(whole, expected)
    inside = torch.zeros(count, dtype=dtype)
    own = inside.split(counts)[made.shard_rank]
    own.copy_(parts[made.shard_rank])
    made.run(all_gather(own, inside, counts=counts))
    assert torch.equal(inside, expected)


def _check_reduced(made: Communicator, rows: torch.Tensor, op: ReduceOp) -> None:
    expected, mine = _expected(rows, op), rows[made.rank].clone()
    whole = torch.empty_like(mine)
    made.run(all_reduce(mine, whole, op))
    assert _same(whole, expected, op)
    assert torch.equal(mine, rows[made.rank])
    made.run(all_reduce(mine, mine, op))
    assert torch.equal(mine, whole)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_levels_give_what_one_gives(two_level: Communicator, dtype: torch.dtype, op: ReduceOp) -> None:
    if not _defined(dtype, op):
        with pytest.raises(Unsupported):
            two_level.prepare(all_reduce(torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype), op))
        return
    assert (two_level.shard_rank, two_level.shard_size) == (two_level.rank, two_level.size)
    for count in COUNTS[: None if op in (ReduceOp.SUM, ReduceOp.AVG) else -1]:
        rows = _rows(two_level.size, count, dtype)
        _check_scattered(two_level, rows, op, None)
        _check_scattered(two_level, rows, op, _uneven(count, two_level.size, count))
        _check_reduced(two_level, rows, op)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_two_levels_gather_in_the_order_of_ranks(two_level: Communicator, dtype: torch.dtype) -> None:
    size, ranks = two_level.size, list(range(two_level.size))
    for count in COUNTS:
        _check_gathered(two_level, ranks, count, dtype, [len(p) for p in torch.arange(count).tensor_split(size)])
        _check_gathered(two_level, ranks, count, dtype, _uneven(count, size, count))
        _check_gathered(two_level, ranks, count, dtype, [0] * (size - 1) + [count])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_of_groups_are_reduced_over_all_ranks(
    hybrid: Communicator, groups: Groups, dtype: torch.dtype, op: ReduceOp
) -> None:
    if not _defined(dtype, op):
        return
    group = next(group for group in groups if hybrid.rank in group)
    assert (hybrid.shard_rank, hybrid.shard_size) == (group.index(hybrid.rank), len(group))
    for count in COUNTS[: None if op in (ReduceOp.SUM, ReduceOp.AVG) else -1]:
        rows = _rows(hybrid.size, count, dtype)
        _check_scattered(hybrid, rows, op, None)
        _check_scattered(hybrid, rows, op, _uneven(count, len(group), count))
        _check_reduced(hybrid, rows, op)


def test_shards_are_gathered_within_groups(hybrid: Communicator, groups: Groups) -> None:
    group = next(group for group in groups if hybrid.rank in group)
    for count in COUNTS:
        for counts in (_uneven(count, len(group), count), [0] * (len(group) - 1) + [count]):
            _check_gathered(hybrid, group, count, torch.float32, counts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1000, 1_500_001])
def test_all_ranks_get_the_same_bits(
    comm: Communicator, two_level: Communicator, hybrid: Communicator, dtype: torch.dtype, count: int
) -> None:
    """Whatever the rounding; and again the next time."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(comm.rank)).to(dtype)
    whole, again = torch.empty_like(values), torch.empty_like(values)
    counts = _uneven(count, hybrid.shard_size, 3)
    shard = torch.empty(counts[hybrid.shard_rank], dtype=dtype)
    for made in (two_level, hybrid):
        made.run(all_reduce(values, whole, ReduceOp.AVG))
        made.run(all_reduce(values, again, ReduceOp.AVG))
        assert torch.equal(whole, again)
        found = objects.allgather_object(comm, whole.numpy().tobytes())
        assert all(one == found[0] for one in found)
    hybrid.run(reduce_scatter(values, shard, counts=counts))
    found = objects.allgather_object(comm, (hybrid.shard_rank, shard.numpy().tobytes()))
    assert len(dict(found)) == hybrid.shard_size
    assert all(dict(found)[number] == data for number, data in found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp32_stands_beside_16_bits(two_level: Communicator, hybrid: Communicator, dtype: torch.dtype) -> None:
    for made in (two_level, hybrid):
        for count in (13, 300_001):
            counts = _uneven(count, made.shard_size, count)
            exact = (_rows(made.size, count, torch.float32) + 1 / 3)[made.rank]
            rounded = torch.stack([row.to(dtype) for row in _rows(made.size, count, torch.float32) + 1 / 3])
            send, recv = torch.empty(count, dtype=dtype), torch.empty(counts[made.shard_rank], dtype=dtype)
            into = torch.zeros(len(recv))
            made.run(reduce_scatter(send, recv, counts=counts, wide=Wide(exact, into)))
            assert torch.equal(send, rounded[made.rank])
            assert torch.equal(into, recv.float())
            whole, wide_whole = torch.empty(count, dtype=dtype), torch.empty(count)
            made.run(all_gather(recv, whole, counts=counts, wide=Wide(into, wide_whole)))
            assert torch.equal(wide_whole, whole.float())
            assert torch.allclose(wide_whole, rounded.float().sum(0), rtol=4 * torch.finfo(dtype).eps)


def test_everything_else_is_over_all_ranks(two_level: Communicator, hybrid: Communicator) -> None:
    for made in (two_level, hybrid):
        size, rank, root = made.size, made.rank, made.size - 1
        told = torch.full((70_001,), float(rank))
        made.run(broadcast(told, root))
        assert torch.all(told == root)
        ahead, swapped = torch.full((2 * size,), rank), torch.empty(2 * size, dtype=torch.int64)
        made.run(all_to_all(ahead, swapped))
        assert swapped.tolist() == [peer for peer in range(size) for _ in range(2)]
        at_root = torch.zeros(3, dtype=torch.int64)
        made.run(reduce(torch.ones(3, dtype=torch.int64), at_root if rank == root else None, root=root))
        assert rank != root or at_root.tolist() == [size] * 3
        made.run(barrier())
        made.post(rank, b"to myself").wait()
        assert made.receive_post(5) == (rank, b"to myself")
        part = made.split(rank % 2)
        assert part is not None
        assert part.shard_size == part.size
        part.run(barrier())
        part.close()
        assert made.pending() == []


def test_persistent_operations_and_many_under_way(two_level: Communicator, hybrid: Communicator) -> None:
    for made in (two_level, hybrid):
        count = 300_001
        counts = _uneven(count, made.shard_size, 5)
        mine, whole, gathered = torch.empty(count), torch.empty(count), torch.empty(count)
        shard = torch.empty(counts[made.shard_rank])
        starts = [
            made.prepare(reduce_scatter(mine, shard, counts=counts, label="shard")),
            made.prepare(all_gather(shard, gathered, counts=counts)),
            made.prepare(all_reduce(mine, whole, ReduceOp.MAX)),
        ]
        issued = made.issued
        for step in range(3):
            rows = _rows(made.size, count, torch.float32) + step
            mine.copy_(rows[made.rank])
            works = [start() for start in starts]
            for work in works:
                work.wait()
            assert works[0].label == "shard"
            assert torch.equal(gathered, rows.sum(0))
            assert torch.equal(whole, rows.amax(0))
        assert made.issued == issued + 9


def test_names_and_wrong_counts(comm: Communicator, two_level: Communicator, hybrid: Communicator) -> None:
    assert two_level.name.endswith(":two_level")
    assert hybrid.name.endswith(":hybrid")
    assert {two_level.backend, hybrid.backend} == {comm.backend}
    assert all(found == hybrid.name for found in objects.allgather_object(comm, hybrid.name))
    wrong = [1] * (hybrid.shard_size + 1)
    with pytest.raises(InvalidUsage, match=f"counts has {len(wrong)} entries for {hybrid.shard_size}"):
        hybrid.prepare(reduce_scatter(torch.empty(len(wrong)), torch.empty(1), counts=wrong))


def test_groups_that_are_no_partition_are_refused_on_every_rank(comm: Communicator) -> None:
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


def test_ranks_that_disagree_about_groups_all_hear_of_it(comm: Communicator) -> None:
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


def test_another_operation_of_another_rank_is_told(comm: Communicator) -> None:
    """And ends the communicator, as it ends any."""
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


def test_random_operations(comm: Communicator) -> None:
    """Issued in one order, several of them under way; every rank waits when it likes."""
    draw, own = random.Random(7), random.Random(comm.rank)
    made = [make(groups) for groups in partitions(comm.size) for make in (comm.two_level, comm.hybrid)]
    owners = [group for groups in partitions(comm.size) for group in groups if comm.rank in group]
    checks: list[tuple[object, torch.Tensor, torch.Tensor, ReduceOp]] = []
    for number in range(500):
        which = draw.randrange(len(made))
        over, count = made[which], draw.choice([0, 1, 5, 700, 9_000, 60_000, 800_000 if number % 20 == 0 else 3])
        dtype, op = draw.choice([torch.float16, torch.float32, torch.int32]), draw.choice(OPS[:3])
        kind, counts = draw.choice("sgr"), _uneven(count, over.shard_size, number)
        rows = _rows(over.size, count, dtype) + number % 5
        expected = _expected(rows, op)
        if kind == "s":
            into, expected = torch.empty(counts[over.shard_rank], dtype=dtype), expected.split(counts)[over.shard_rank]
            work = over.start(reduce_scatter(rows[over.rank], into, op, counts=counts))
        elif kind == "r":
            into = torch.empty(count, dtype=dtype)
            work = over.start(all_reduce(rows[over.rank], into, op))
        else:
            group = owners[which // 2] if which % 2 else range(over.size)
            starts = [sum(counts[:i]) for i in range(len(counts))]
            expected = torch.cat([rows[r][s : s + n] for r, s, n in zip(group, starts, counts, strict=True)])
            start = starts[over.shard_rank]
            mine, into = rows[over.rank][start : start + counts[over.shard_rank]].clone(), torch.empty_like(rows[0])
            work = over.start(all_gather(mine, into, counts=counts))
        checks.append((work, into, expected, op))
        while checks and (own.random() < 0.3 or len(checks) > 20):
            work, into, expected, op = checks.pop(own.randrange(len(checks)))
            work.wait(20)  # type: ignore[attr-defined]
            assert _same(into, expected, op)
    for work, into, expected, op in checks:
        work.wait(20)  # type: ignore[attr-defined]
        assert _same(into, expected, op)
    for one in made:
        one.close()
