"""What collectives by name compute, in every form, for every type and layout."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dear as hvd
from overlap.horovod.reduction import FUSED_BYTES

pytestmark = pytest.mark.four_ranks

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
FOLDS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    hvd.Sum: lambda rows: rows.sum(0),
    hvd.Min: lambda rows: rows.amin(0),
    hvd.Max: lambda rows: rows.amax(0),
    hvd.Product: lambda rows: rows.prod(0),
}


def _rows(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """What all ranks contribute: small whole numbers, exact in every type."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 3, (hvd.size(), *shape), generator=generator).to(dtype)


def _mine(rows: torch.Tensor) -> torch.Tensor:
    return rows[hvd.rank()].clone()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_is_summed_and_moved(dtype: torch.dtype) -> None:
    rows = _rows((4, 3), dtype)
    wide = rows if rows.is_complex() else rows.to(torch.float64 if dtype.is_floating_point else torch.int64)
    assert torch.equal(hvd.allreduce(_mine(rows), op=hvd.Sum), wide.sum(0).to(dtype))
    assert torch.equal(hvd.allgather(_mine(rows)), rows.reshape(-1, 3))
    assert torch.equal(hvd.broadcast(_mine(rows), hvd.size() - 1), rows[-1])
    shares = torch.arange(4).tensor_split(hvd.size())[hvd.rank()]
    assert torch.equal(hvd.reducescatter(_mine(rows), op=hvd.Sum), wide.sum(0).to(dtype)[shares])


@pytest.mark.parametrize("op", FOLDS)
def test_every_reduction(op: Any) -> None:
    rows = _rows((5,), seed=1)
    assert torch.equal(hvd.allreduce(_mine(rows), op=op), FOLDS[op](rows))


def test_averages_of_floats_of_whole_numbers_and_of_halves_that_would_overflow() -> None:
    rows = _rows((6,), seed=2)
    assert torch.allclose(hvd.allreduce(_mine(rows)), rows.mean(0))
    whole = rows.long() * -7
    assert torch.equal(hvd.allreduce(_mine(whole)), whole.sum(0).div(hvd.size(), rounding_mode="trunc"))
    assert torch.equal(hvd.allreduce(torch.full((3,), 60000.0).half()), torch.full((3,), 60000.0).half())


@pytest.mark.parametrize(("dtype", "large"), [(torch.uint8, 200), (torch.int8, -100), (torch.int16, 30_000)])
def test_averages_of_small_numbers_whose_sum_is_none(dtype: torch.dtype, large: int) -> None:
    rows = torch.full((8, 2), large, dtype=dtype)
    assert torch.equal(hvd.allreduce(rows), rows)
    assert torch.equal(hvd.allreduce_(rows.clone()), rows)
    assert all(torch.equal(one, rows) for one in hvd.grouped_allreduce([rows, rows]))
    mine = hvd.reducescatter(rows)
    assert mine.dtype is dtype
    assert torch.equal(mine, torch.full_like(mine, large))


def test_booleans() -> None:
    mine = torch.tensor([hvd.rank() == 0, True, False])
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [True, True, False]
    assert hvd.allreduce(mine, op=hvd.Product).tolist() == [hvd.size() == 1, True, False]
    assert hvd.allgather(mine).sum() == hvd.size() + 1
    with pytest.raises(RuntimeError, match="booleans can be neither averaged"):
        hvd.allreduce(mine)


@pytest.mark.parametrize(("prescale", "postscale"), [(0.5, 1.0), (1.0, 4.0), (0.5, 6.0)])
def test_factors(prescale: float, postscale: float) -> None:
    rows = _rows((4,), torch.float64)
    expected = (rows * prescale).sum(0) * postscale
    mine = _mine(rows)
    factors = {"prescale_factor": prescale, "postscale_factor": postscale}
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum, **factors), expected)
    assert torch.equal(mine, rows[hvd.rank()])
    shares = torch.arange(4).tensor_split(hvd.size())[hvd.rank()]
    assert torch.equal(hvd.reducescatter(mine, op=hvd.Sum, **factors), expected[shares])
    whole = torch.full((2,), 3, dtype=torch.int32)
    cut = int(3 * prescale) * hvd.size()
    assert hvd.allreduce(whole, op=hvd.Sum, **factors).tolist() == [int(cut * postscale)] * 2


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1),
    "strided": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
    "channels last": lambda t: t.reshape(1, 2, 2, 3).contiguous(memory_format=torch.channels_last),
    "conjugate": lambda t: t.to(torch.complex64).conj(),
    "expanded": lambda t: t[:, :1].expand(4, 5),
    "scalar": lambda t: t[0, 0],
    "empty": lambda t: t[:0],
    "no columns": lambda t: t[:, :0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_keeps_its_place_when_written(layout: str) -> None:
    arrange = LAYOUTS[layout]
    rows = _rows((4, 3), seed=3)
    arranged = torch.stack([arrange(row) for row in rows])
    mine = arrange(_mine(rows))
    strides = mine.stride()
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), arranged.sum(0))
    result = hvd.broadcast_(mine, 0)
    assert result is mine
    assert torch.equal(mine, arranged[0])
    assert mine.stride() == strides
    assert hvd.allreduce_(mine, op=hvd.Max if not mine.is_complex() else hvd.Average) is mine
    assert torch.equal(mine, arranged[0])


def test_gathers_of_different_numbers_of_rows() -> None:
    count = 2 * hvd.rank() if hvd.rank() != 1 else 0
    mine = torch.full((count, 2), float(hvd.rank()))
    expected = torch.cat([torch.full((2 * rank if rank != 1 else 0, 2), float(rank)) for rank in range(hvd.size())])
    assert torch.equal(hvd.allgather(mine), expected)
    assert hvd.allgather(torch.tensor(hvd.rank())).tolist() == list(range(hvd.size()))


def test_alltoall_with_and_without_splits() -> None:
    size, me = hvd.size(), hvd.rank()
    mine = torch.arange(2 * size).view(size, 2) + 100 * me
    assert torch.equal(
        hvd.alltoall(mine), torch.stack([torch.tensor([2 * me, 2 * me + 1]) + 100 * rank for rank in range(size)])
    )
    # Rank r sends r + p rows to rank p.
    splits = torch.tensor([me + peer for peer in range(size)])
    rows, received = hvd.alltoall(torch.full((int(splits.sum()), 3), float(me)), splits)
    assert received.tolist() == [rank + me for rank in range(size)]
    assert received.dtype is splits.dtype
    assert torch.equal(rows[:, 0], torch.cat([torch.full((rank + me,), float(rank)) for rank in range(size)]))
    output, received = hvd.synchronize(hvd.alltoall_async(mine, name="pair"))
    assert (output.shape, received.tolist()) == (mine.shape, [1] * size)


def test_groups() -> None:
    large = FUSED_BYTES // 4 + 5
    shapes: list[tuple[int, ...]] = [(3,), (), (2, 2), (0,), (large,), (7,)]
    rows = [_rows(shape, dtype, seed) for seed, shape in enumerate(shapes) for dtype in (torch.float32, torch.int64)]
    sums = [each.sum(0) for each in rows]
    for result in (
        hvd.grouped_allreduce([_mine(each) for each in rows], op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async([_mine(each) for each in rows], op=hvd.Sum, name="g")),
    ):
        assert all(torch.equal(got, wanted) for got, wanted in zip(result, sums, strict=True))
    mine = [_mine(each) for each in rows]
    assert hvd.grouped_allreduce_(mine, op=hvd.Sum)[0] is mine[0]
    assert all(torch.equal(got, wanted) for got, wanted in zip(mine, sums, strict=True))
    mine = [_mine(each) for each in rows]
    hvd.synchronize(hvd.grouped_allreduce_async_(mine, op=hvd.Sum))
    assert all(torch.equal(got, wanted) for got, wanted in zip(mine, sums, strict=True))
    matrices = [each for each in rows if each.dim() > 1]
    gathered = hvd.grouped_allgather([_mine(each) for each in matrices])
    assert all(torch.equal(got, each.flatten(0, 1)) for got, each in zip(gathered, matrices, strict=True))
    shards = hvd.grouped_reducescatter([_mine(each) for each in matrices], op=hvd.Sum)
    for got, each in zip(shards, matrices, strict=True):
        assert torch.equal(got, each.sum(0).tensor_split(hvd.size())[hvd.rank()])
    handles = [hvd.grouped_allgather_async(matrices), hvd.grouped_reducescatter_async(matrices, op=hvd.Sum)]
    assert [len(hvd.synchronize(handle)) for handle in handles] == [len(matrices)] * 2
    assert hvd.grouped_allreduce([]) == []


def test_groups_from_an_iterator() -> None:
    for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_):
        assert [one.tolist() for one in call((torch.ones(2) for _ in range(2)), op=hvd.Sum)] == [[hvd.size()] * 2] * 2
    for call in (hvd.grouped_allreduce_async, hvd.grouped_allreduce_async_, hvd.grouped_reducescatter_async):
        found = hvd.synchronize(call(map(torch.ones, (4, 8)), op=hvd.Sum))
        assert [set(one.tolist()) for one in found] == [{hvd.size()}] * 2
    assert [one.tolist() for one in hvd.synchronize(hvd.grouped_allgather_async(map(torch.ones, (1, 1))))] == [
        [1.0] * hvd.size()
    ] * 2


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16])
def test_compression_gives_back_the_type_it_was_given(compression: Any) -> None:
    rows = _rows((5,), torch.float64)
    assert torch.allclose(hvd.allreduce(_mine(rows), compression=compression), rows.mean(0), atol=1e-2)
    whole = rows.long()
    assert torch.equal(hvd.allreduce(_mine(whole), compression=compression, op=hvd.Sum), whole.sum(0))
    (mean,) = hvd.grouped_allreduce([_mine(rows)], compression=compression, op=hvd.Sum)
    assert torch.equal(mean, rows.sum(0))
    shard = hvd.reducescatter(_mine(rows), compression=compression, op=hvd.Sum)
    assert torch.equal(shard, rows.sum(0).tensor_split(hvd.size())[hvd.rank()])


def test_a_compressor_of_ones_own() -> None:
    class Halved(hvd.Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return tensor / 2, "halved"

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            assert ctx == "halved"
            return tensor * 2

    rows = _rows((5,))
    assert torch.allclose(hvd.allreduce(_mine(rows), compression=Halved), rows.mean(0))


def test_asynchronous_forms() -> None:
    rows = _rows((4, 2), seed=5)
    mine = _mine(rows)
    handles = [
        hvd.allreduce_async(mine, op=hvd.Sum),
        hvd.allgather_async(mine),
        hvd.broadcast_async(mine, 0),
        hvd.reducescatter_async(mine, op=hvd.Sum),
    ]
    assert all(isinstance(handle, int) for handle in handles)
    expected = [rows.sum(0), rows.flatten(0, 1), rows[0], rows.sum(0).tensor_split(hvd.size())[hvd.rank()]]
    for handle, wanted in zip(handles, expected, strict=True):
        assert torch.equal(hvd.synchronize(handle), wanted)
    hvd.barrier()
    inplace = [_mine(rows), _mine(rows)]
    first, second = hvd.allreduce_async_(inplace[0], op=hvd.Sum), hvd.broadcast_async_(inplace[1], 0)
    hvd.barrier()  # asked for after both by everybody: they are under way
    assert hvd.synchronize(first) is inplace[0]
    assert torch.equal(inplace[0], rows.sum(0))
    hvd.synchronize(second)
    assert torch.equal(inplace[1], rows[0])


def test_handles() -> None:
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    assert hvd.poll(handle) in (True, False)
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 2
    assert hvd.synchronize(handle) is None  # as in Horovod
    with pytest.raises(ValueError, match="never given out"):
        hvd.poll(handle)
    with pytest.raises(ValueError, match="never given out"):
        hvd.synchronize(10**9)


def test_old_average_argument() -> None:
    """One warning a call, which names the line of the script."""
    ones = torch.ones(1, requires_grad=True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        total = hvd.allreduce(ones, average=False)
        total.backward()
        assert total.item() == ones.grad.item() == hvd.size()
        assert hvd.allreduce_(torch.ones(1), average=True).item() == 1
        assert hvd.synchronize(hvd.allreduce_async(torch.ones(1), False)).item() == hvd.size()
        assert [one.item() for one in hvd.grouped_allreduce([torch.ones(1)], average=True)] == [1]
    old = [warning.filename for warning in warned if "old spelling" in str(warning.message)]
    assert old == [__file__] * 4
    with pytest.raises(ValueError, match="the same thing twice"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="given as op="):
        hvd.allreduce(torch.ones(1), hvd.Sum)  # type: ignore[arg-type]


def test_objects() -> None:
    last = hvd.size() - 1
    assert hvd.broadcast_object({"rank": hvd.rank()}, root_rank=last) == {"rank": last}
    assert hvd.broadcast_object("mine" if hvd.rank() == 0 else None, name="text") == "mine"
    assert hvd.allgather_object("x" * 1000 * hvd.rank()) == ["x" * 1000 * rank for rank in range(hvd.size())]
    with pytest.raises((TypeError, hvd.HorovodInternalError), match="cannot be pickled"):
        hvd.broadcast_object(lambda: 0)


def test_sparse_sums() -> None:
    me = hvd.rank()
    mine = torch.sparse_coo_tensor(torch.tensor([[0, me + 1]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (6, 2))
    result = hvd.sparse_allreduce_async(mine, name="embedding", op=hvd.Sum)()
    dense = torch.zeros(6, 2)
    for rank in range(hvd.size()):
        dense[0] += torch.tensor([1.0, 2.0])
        dense[rank + 1] += torch.tensor([3.0, 4.0])
    assert torch.equal(result.to_dense(), dense)
    mean = hvd.sparse_allreduce_async(mine, name="embedding", op=hvd.Average)()
    assert torch.allclose(mean.to_dense(), dense / hvd.size())
    with pytest.raises(ValueError, match="sparse COO"):
        hvd.sparse_allreduce_async(dense, name="dense", op=hvd.Sum)
    with pytest.raises(ValueError, match="sparse_allreduce_async"):
        hvd.allreduce(mine)
