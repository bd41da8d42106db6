"""Every collective, for every dtype, in contiguous memory and in other, at once and by a work that is waited for."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from tests.backend.world import (
    ALL,
    FLOATS,
    INTEGERS,
    MOVED,
    NO_GAPS,
    REDUCED,
    SEVERAL,
    all_gather_single,
    as_far_as_gloo_can,
    blank,
    contents,
    equal,
    everybodys,
    meet,
    mine,
    reduce_scatter_single,
)
from tests.spmd_plugin import RANK, SIZE

SHAPE = (3, 5)
LAST = SIZE - 1
Call = Callable[..., "dist.Work | None"]

EXACT = {
    "sum": (dist.ReduceOp.SUM, lambda all_: torch.stack(all_).sum(0)),
    "product": (dist.ReduceOp.PRODUCT, lambda all_: torch.stack(all_).prod(0)),
    "min": (dist.ReduceOp.MIN, lambda all_: torch.stack(all_).amin(0)),
    "max": (dist.ReduceOp.MAX, lambda all_: torch.stack(all_).amax(0)),
}
BITWISE = {
    "band": (dist.ReduceOp.BAND, torch.bitwise_and),
    "bor": (dist.ReduceOp.BOR, torch.bitwise_or),
    "bxor": (dist.ReduceOp.BXOR, torch.bitwise_xor),
}


def _run(call: Call, *arguments: object, waits: bool, **options: object) -> None:
    work = call(*arguments, async_op=waits, **options)
    if waits:
        assert work is not None
        work.wait()
    else:
        assert work is None


def _layouts() -> Iterator[tuple[str, bool]]:
    """Of memory that gloo takes, and whether the call is waited for."""
    yield from itertools.product(("contiguous", "transposed"), (False, True))


def _total(dtype: torch.dtype, op: str = "sum") -> torch.Tensor:
    return EXACT[op][1](everybodys(SHAPE, dtype)).to(dtype)


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
@pytest.mark.parametrize("op", list(EXACT))
def test_all_reduce(dtype: torch.dtype, op: str) -> None:
    for layout, waits in _layouts():
        tensor = mine(layout, SHAPE, dtype)
        _run(dist.all_reduce, tensor, EXACT[op][0], waits=waits)
        equal(tensor, _total(dtype, op), (layout, waits))


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_reduce(dtype: torch.dtype) -> None:
    for (layout, waits), root in itertools.product(_layouts(), {0, LAST}):
        tensor = mine(layout, SHAPE, dtype)
        _run(dist.reduce, tensor, root, waits=waits)
        if root == RANK:  # what others have then, nobody promises
            equal(tensor, _total(dtype), (layout, waits, root))


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
@pytest.mark.parametrize("form", ["concatenated", "stacked"])
def test_reduce_scatter_of_one_tensor(dtype: torch.dtype, form: str) -> None:
    shape = (SIZE * SHAPE[0], SHAPE[1]) if form == "concatenated" else (SIZE, *SHAPE)
    expected = torch.stack(everybodys(shape, dtype)).sum(0).to(dtype).reshape(SIZE, *SHAPE)[RANK]
    for waits in (False, True):
        whole, part = mine("contiguous", shape, dtype), blank("contiguous", SHAPE, dtype)
        with as_far_as_gloo_can():
            _run(reduce_scatter_single, part, whole, waits=waits)
        equal(part, expected, waits)
        equal(whole, contents(RANK, shape, dtype), "the input stays what it was")


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_reduce_scatter_of_a_list(dtype: torch.dtype) -> None:
    shape = (SIZE, *SHAPE)
    expected = torch.stack(everybodys(shape, dtype)).sum(0).to(dtype)[RANK]
    for layout, waits in _layouts():
        parts = [blank(layout, SHAPE, dtype).copy_(one) for one in contents(RANK, shape, dtype)]
        result = blank(layout, SHAPE, dtype)
        with as_far_as_gloo_can():
            _run(dist.reduce_scatter, result, parts, waits=waits)
        equal(result, expected, (layout, waits))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("form", ["concatenated", "stacked"])
def test_all_gather_of_one_tensor(dtype: torch.dtype, form: str) -> None:
    shape = (SIZE * SHAPE[0], SHAPE[1]) if form == "concatenated" else (SIZE, *SHAPE)
    for waits in (False, True):
        whole = blank("contiguous", shape, dtype)
        with as_far_as_gloo_can():
            _run(all_gather_single, whole, mine("contiguous", SHAPE, dtype), waits=waits)
        equal(whole, torch.stack(everybodys(SHAPE, dtype)).reshape(shape), waits)


def test_all_gather_where_the_input_is_a_part_of_the_output() -> None:
    """As ``fully_shard`` has it."""
    whole = blank("contiguous", (SIZE * 8,), torch.float32)
    whole[8 * RANK : 8 * RANK + 8] = contents(RANK, (8,), torch.float32)
    all_gather_single(whole, whole[8 * RANK : 8 * RANK + 8])
    equal(whole, torch.cat(everybodys((8,), torch.float32)))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_all_gather_into_a_list(dtype: torch.dtype) -> None:
    for layout, waits in _layouts():
        found = [blank(layout, SHAPE, dtype) for _ in ALL]
        _run(dist.all_gather, found, mine(layout, SHAPE, dtype), waits=waits)
        for one, expected in zip(found, everybodys(SHAPE, dtype), strict=True):
            equal(one, expected, (layout, waits))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_broadcast(dtype: torch.dtype) -> None:
    for (layout, waits), root in itertools.product(_layouts(), {0, LAST}):
        tensor = mine(layout, SHAPE, dtype)
        _run(dist.broadcast, tensor, root, waits=waits)
        equal(tensor, contents(root, SHAPE, dtype), (layout, waits, root))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_gather(dtype: torch.dtype) -> None:
    for (layout, waits), root in itertools.product(_layouts(), {0, LAST}):
        found = [blank(layout, SHAPE, dtype) for _ in ALL] if root == RANK else None
        with as_far_as_gloo_can():
            _run(dist.gather, mine(layout, SHAPE, dtype), found, root, waits=waits)
        for one, expected in zip(found or (), everybodys(SHAPE, dtype), strict=False):
            equal(one, expected, (layout, waits, root))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_scatter(dtype: torch.dtype) -> None:
    for (layout, waits), root in itertools.product(_layouts(), {0, LAST}):
        given = [blank(layout, SHAPE, dtype).copy_(one) for one in everybodys(SHAPE, dtype)] if root == RANK else None
        result = blank(layout, SHAPE, dtype)
        _run(dist.scatter, result, given, root, waits=waits)
        equal(result, contents(RANK, SHAPE, dtype), (layout, waits, root))


def _letter(sender: int, receiver: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return contents(7 * sender + receiver, (numel,), dtype)


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_all_to_all_of_one_tensor(dtype: torch.dtype) -> None:
    for waits in (False, True):
        sent = torch.cat([_letter(RANK, to, 3, dtype) for to in ALL])
        found = torch.empty_like(sent)
        _run(dist.all_to_all_single, found, sent, waits=waits)
        equal(found, torch.cat([_letter(sender, RANK, 3, dtype) for sender in ALL]), waits)


def _count(sender: int, receiver: int) -> int:
    """Elements that go from one to the other: some pairs have none."""
    return (sender + 2 * receiver) % 4


def test_all_to_all_of_one_tensor_in_uneven_parts() -> None:
    for dtype, waits in itertools.product((torch.float32, torch.bfloat16, torch.int64), (False, True)):
        sent = torch.cat([_letter(RANK, to, _count(RANK, to), dtype) for to in ALL])
        splits = [_count(sender, RANK) for sender in ALL], [_count(RANK, to) for to in ALL]
        found = torch.empty(sum(splits[0]), dtype=dtype)
        _run(dist.all_to_all_single, found, sent, *splits, waits=waits)
        letters = [_letter(sender, RANK, _count(sender, RANK), dtype) for sender in ALL]
        equal(found, torch.cat(letters), (dtype, waits))


def test_all_to_all_splits_rows() -> None:
    """Splits count rows of more than one element."""
    splits = [_count(sender, RANK) for sender in ALL], [_count(RANK, to) for to in ALL]
    sent = torch.cat([_letter(RANK, to, 5 * _count(RANK, to), torch.float32) for to in ALL]).reshape(-1, 5)
    found = torch.empty(sum(splits[0]), 5)
    dist.all_to_all_single(found, sent, *splits)
    letters = [_letter(sender, RANK, 5 * _count(sender, RANK), torch.float32) for sender in ALL]
    equal(found, torch.cat(letters).reshape(-1, 5))


@pytest.mark.parametrize("even", [True, False])
def test_all_to_all_of_lists(even: bool) -> None:
    for dtype, waits in itertools.product(MOVED, (False, True)):
        counts = [(3, 3) if even else (_count(RANK, to), _count(to, RANK)) for to in ALL]
        sent = [_letter(RANK, to, counts[to][0], dtype) for to in ALL]
        found = [blank("contiguous", (counts[sender][1],), dtype) for sender in ALL]
        with as_far_as_gloo_can():
            _run(dist.all_to_all, found, sent, waits=waits)
        for sender in ALL:
            equal(found[sender], _letter(sender, RANK, counts[sender][1], dtype), (dtype, waits, sender))


def test_all_gather_of_uneven_tensors() -> None:
    for waits in (False, True):
        found = [blank("contiguous", (rank + 1, 2), torch.float32) for rank in ALL]
        with as_far_as_gloo_can():
            _run(dist.all_gather, found, mine("contiguous", (RANK + 1, 2), torch.float32), waits=waits)
        for rank in ALL:
            equal(found[rank], contents(rank, (rank + 1, 2), torch.float32), (waits, rank))


def test_reduce_scatter_of_uneven_tensors() -> None:
    for waits in (False, True):
        parts = [mine("contiguous", (rank + 1, 2), torch.float32) for rank in ALL]
        result = blank("contiguous", (RANK + 1, 2), torch.float32)
        with as_far_as_gloo_can():
            _run(dist.reduce_scatter, result, parts, waits=waits)
        equal(result, torch.stack(everybodys((RANK + 1, 2), torch.float32)).sum(0), waits)


# - Reductions beside the sum


@pytest.mark.parametrize("op", list(BITWISE))
def test_bitwise_reductions(op: str) -> None:
    reduction, pair = BITWISE[op]
    for dtype in INTEGERS:
        tensor = mine("contiguous", SHAPE, dtype)
        dist.all_reduce(tensor, reduction)
        expected = contents(0, SHAPE, dtype)
        for rank in ALL[1:]:
            expected = pair(expected, contents(rank, SHAPE, dtype))
        equal(tensor, expected, dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_averages(dtype: torch.dtype) -> None:
    tensor = mine("contiguous", SHAPE, dtype)
    with as_far_as_gloo_can():
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
    equal(tensor, _total(dtype) / SIZE, "all_reduce")
    part, shape = blank("contiguous", SHAPE, dtype), (SIZE * SHAPE[0], SHAPE[1])
    reduce_scatter_single(part, mine("contiguous", shape, dtype), dist.ReduceOp.AVG)
    equal(part, torch.stack(everybodys(shape, dtype)).sum(0).to(dtype).chunk(SIZE)[RANK] / SIZE, "reduce_scatter")


def test_sums_of_complex_numbers() -> None:
    for dtype in (torch.complex64, torch.complex128):
        tensor = mine("contiguous", SHAPE, dtype)
        dist.all_reduce(tensor)
        equal(tensor, torch.stack(everybodys(SHAPE, dtype)).sum(0), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_sum_in_16_bits_is_the_same_on_all_ranks(dtype: torch.dtype) -> None:
    """Whatever the order in which it is rounded."""
    torch.manual_seed(RANK)
    given = torch.randn(1000)
    tensor = given.to(dtype)
    exact = tensor.double()
    dist.all_reduce(tensor)
    dist.all_reduce(exact)
    assert torch.allclose(tensor.double(), exact, rtol=0.05, atol=0.05)
    found = [torch.empty_like(tensor) for _ in ALL]
    dist.all_gather(found, tensor)
    assert all(torch.equal(one, tensor) for one in found)


# - Tensors of all kinds of sizes and memory


@pytest.mark.parametrize("numel", [0, 1, 2, 7, 4097, 2**18 + 3])
def test_sizes(numel: int) -> None:
    tensor = mine("contiguous", (numel,), torch.float32)
    dist.all_reduce(tensor)
    equal(tensor, torch.stack(everybodys((numel,), torch.float32)).sum(0), "all_reduce")
    dist.broadcast(tensor, LAST)
    whole = blank("contiguous", (SIZE * numel,), torch.float32)
    all_gather_single(whole, mine("contiguous", (numel,), torch.float32))
    equal(whole, torch.cat(everybodys((numel,), torch.float32)), "all_gather")
    part = blank("contiguous", (numel,), torch.float32)
    reduce_scatter_single(part, whole)
    equal(part, whole[RANK * numel : (RANK + 1) * numel] * SIZE, "reduce_scatter")


def test_a_tensor_without_dimensions() -> None:
    tensor = torch.tensor(float(RANK))
    dist.all_reduce(tensor)
    equal(tensor, torch.tensor(float(sum(ALL))))
    dist.broadcast(tensor, LAST)
    found = torch.empty(SIZE)
    with as_far_as_gloo_can():
        all_gather_single(found, torch.tensor(float(RANK)))
    equal(found, torch.arange(SIZE).float())


@pytest.mark.parametrize("layout", ["contiguous", pytest.param("gaps", marks=NO_GAPS)])
def test_memory_beside_a_tensor_stays_what_it_was(layout: str) -> None:
    around = torch.full((64,), 5.0)
    step = 2 if layout == "gaps" else 1
    inside = around[10 : 10 + 8 * step : step]
    inside.copy_(contents(RANK, (8,), torch.float32))
    dist.all_reduce(inside)
    equal(inside, torch.stack(everybodys((8,), torch.float32)).sum(0))
    inside.fill_(5.0)
    equal(around, torch.full((64,), 5.0))


@NO_GAPS
def test_every_second_element() -> None:
    """What is not dense in memory, either way."""
    tensor = mine("gaps", SHAPE, torch.float32)
    dist.broadcast(tensor, LAST)
    equal(tensor, contents(LAST, SHAPE, torch.float32), "broadcast")
    found = [blank("gaps", SHAPE, torch.float32) for _ in ALL]
    dist.all_gather(found, mine("gaps", SHAPE, torch.float32))
    for one, expected in zip(found, everybodys(SHAPE, torch.float32), strict=True):
        equal(one, expected, "all_gather")


def test_parameters_that_record_gradients() -> None:
    parameter = torch.nn.Parameter(mine("contiguous", SHAPE, torch.float32))
    with torch.no_grad():
        dist.broadcast(parameter, LAST)
        dist.all_reduce(parameter)
    equal(parameter.detach(), contents(LAST, SHAPE, torch.float32) * SIZE)


# - Works


def test_works_are_done_in_any_order() -> None:
    tensors = [contents(RANK + number, (50 + number,), torch.float32) for number in range(40)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number in (39, 0, *range(1, 39)):
        works[number].wait()
        assert works[number].is_completed()
        expected = sum(contents(rank + number, (50 + number,), torch.float32) for rank in ALL)
        equal(tensors[number], expected, number)


def test_different_operations_are_on_their_way_at_once() -> None:
    total, whole = mine("contiguous", (1000,), torch.float32), torch.empty(SIZE * 1000)
    part, copy = torch.empty(10), mine("contiguous", (3,), torch.int64)
    works = [
        dist.all_reduce(total, async_op=True),
        all_gather_single(whole, mine("contiguous", (1000,), torch.float32), async_op=True),
        reduce_scatter_single(part, torch.ones(SIZE * 10), async_op=True),
        dist.broadcast(copy, LAST, async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    equal(total, torch.stack(everybodys((1000,), torch.float32)).sum(0))
    equal(whole, torch.cat(everybodys((1000,), torch.float32)))
    equal(part, torch.full((10,), float(SIZE)))
    equal(copy, contents(LAST, (3,), torch.int64))


def test_a_future_has_the_tensors() -> None:
    tensor = mine("contiguous", SHAPE, torch.float32)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    (found,) = future.wait()
    equal(found, _total(torch.float32))
    doubled = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: 2 * done.value()[0]).wait()
    equal(doubled, 2 * SIZE * _total(torch.float32))


@SEVERAL
def test_a_work_is_not_over_before_all_ranks_have_begun() -> None:
    """A collective returns at once; so a rank may compute before the others come."""
    tensor = torch.ones(4)
    if RANK == 0:
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed()
    meet()
    if RANK != 0:
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    equal(tensor, torch.full((4,), float(SIZE)))


def test_results_outlive_what_was_sent() -> None:
    """A work keeps the tensors that it needs."""
    found = torch.empty(SIZE * 4096)
    work = all_gather_single(found, torch.full((4096,), float(RANK)), async_op=True)
    torch.full((4096,), -1.0)  # takes the memory if it is free
    work.wait()
    equal(found, torch.arange(SIZE).float().repeat_interleave(4096))


def test_a_work_that_nobody_waits_for_is_done() -> None:
    tensors = [torch.ones(8) for _ in range(20)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    until = time.monotonic() + 10
    while not all(torch.equal(tensor, torch.full((8,), float(SIZE))) for tensor in tensors):
        assert time.monotonic() < until
        time.sleep(0.001)


# - Mistakes that this rank alone can see


def test_sizes_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    for call in (
        lambda: all_gather_single(torch.empty(SIZE * 4 + 1), torch.ones(4)),
        lambda: reduce_scatter_single(torch.empty(4), torch.ones(SIZE * 4 + 1)),
        lambda: dist.all_gather([torch.empty(4) for _ in range(SIZE + 1)], torch.ones(4)),
        lambda: dist.all_to_all_single(torch.empty(SIZE), torch.ones(SIZE), [2] * SIZE, [1] * SIZE),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            call()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    equal(tensor, torch.full((2,), float(SIZE)))


def test_dtypes_that_do_not_fit_are_refused() -> None:
    for call in (
        lambda: all_gather_single(torch.empty(SIZE * 4, dtype=torch.float64), torch.ones(4)),
        lambda: reduce_scatter_single(torch.empty(4, dtype=torch.float64), torch.ones(SIZE * 4)),
        lambda: dist.all_gather([torch.empty(4, dtype=torch.int64) for _ in ALL], torch.ones(4)),
    ):
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            call()
