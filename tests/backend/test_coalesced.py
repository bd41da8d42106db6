"""Several tensors in one call: the coalesced forms, which ``fully_shard``, DDP's buffers and functional collectives use."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.backend.world import (
    ALL,
    SEVERAL,
    all_gather_single,
    as_far_as_gloo_can,
    blank,
    contents,
    equal,
    everybodys,
    mine,
    reduce_scatter_single,
)
from tests.spmd_plugin import RANK, SIZE

SHAPES = ((3, 5), (1,), (7,), (2, 2, 2))
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64)


def _sum(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.stack(everybodys(shape, dtype)).sum(0).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("waits", [False, True])
def test_all_reduce_coalesced(dtype: torch.dtype, waits: bool) -> None:
    tensors = [mine("contiguous", shape, dtype) for shape in SHAPES]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will take it away one day
        future = dist.all_reduce_coalesced(tensors, async_op=waits)
    if waits:
        future.wait()
    for tensor, shape in zip(tensors, SHAPES, strict=True):
        equal(tensor, _sum(shape, dtype), shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("waits", [False, True])
def test_all_gather_coalesced(dtype: torch.dtype, waits: bool) -> None:
    found = [[blank("contiguous", shape, dtype) for shape in SHAPES] for _ in ALL]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        future = dist.all_gather_coalesced(found, [mine("contiguous", s, dtype) for s in SHAPES], async_op=waits)
    if waits:
        future.wait()
    for rank, tensors in zip(ALL, found, strict=True):
        for tensor, shape in zip(tensors, SHAPES, strict=True):
            equal(tensor, contents(rank, shape, dtype), (rank, shape))


@pytest.mark.parametrize("waits", [False, True])
def test_the_coalescing_manager_all_reduces(waits: bool) -> None:
    tensors = [mine("contiguous", shape, torch.float32) for shape in SHAPES]
    with _coalescing_manager(async_ops=waits) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    if waits:
        manager.wait()
    for tensor, shape in zip(tensors, SHAPES, strict=True):
        equal(tensor, _sum(shape, torch.float32), shape)


@pytest.mark.parametrize("waits", [False, True])
def test_the_coalescing_manager_gathers(waits: bool) -> None:
    found = [blank("contiguous", (SIZE * shape[0], *shape[1:]), torch.float32) for shape in SHAPES]
    with _coalescing_manager(async_ops=waits) as manager:
        for whole, shape in zip(found, SHAPES, strict=True):
            all_gather_single(whole, mine("contiguous", shape, torch.float32))
    if waits:
        manager.wait()
    for whole, shape in zip(found, SHAPES, strict=True):
        equal(whole, torch.cat(everybodys(shape, torch.float32)), shape)


@pytest.mark.parametrize("waits", [False, True])
def test_the_coalescing_manager_reduces_and_scatters(waits: bool) -> None:
    found = [blank("contiguous", shape, torch.float32) for shape in SHAPES]
    with _coalescing_manager(async_ops=waits) as manager:
        for part, shape in zip(found, SHAPES, strict=True):
            reduce_scatter_single(part, mine("contiguous", (SIZE * shape[0], *shape[1:]), torch.float32))
    if waits:
        manager.wait()
    for part, shape in zip(found, SHAPES, strict=True):
        equal(part, _sum((SIZE * shape[0], *shape[1:]), torch.float32).chunk(SIZE)[RANK], shape)


# - The functional forms, which DTensor and compiled code use


def _done(tensor: torch.Tensor) -> torch.Tensor:
    """Gathers of columns are waited for by themselves."""
    return tensor.wait() if isinstance(tensor, funcol.AsyncCollectiveTensor) else tensor


def test_functional_collectives() -> None:
    given, shape = mine("contiguous", (4, 3), torch.float32), (4, 3)
    equal(_done(funcol.all_reduce(given, "sum", dist.group.WORLD)), _sum(shape, torch.float32), "all_reduce")
    equal(given, contents(RANK, shape, torch.float32), "what was given stays")
    whole = _done(funcol.all_gather_tensor(given, 0, dist.group.WORLD))
    equal(whole, torch.cat(everybodys(shape, torch.float32)), "all_gather")
    beside = _done(funcol.all_gather_tensor(given, 1, dist.group.WORLD))
    equal(beside, torch.cat(everybodys(shape, torch.float32), 1), "all_gather of columns")
    part = _done(funcol.reduce_scatter_tensor(whole, "sum", 0, dist.group.WORLD))
    equal(part, SIZE * given, "reduce_scatter")
    equal(_done(funcol.broadcast(given, 0, dist.group.WORLD)), contents(0, shape, torch.float32), "broadcast")
    turned = _done(funcol.all_to_all_single(whole, None, None, dist.group.WORLD))
    equal(turned, contents(RANK, shape, torch.float32).repeat(SIZE, 1), "all_to_all")


def test_functional_collectives_of_several_tensors() -> None:
    given = [mine("contiguous", shape, torch.float32) for shape in SHAPES]
    for found, shape in zip(funcol.all_reduce_coalesced(given, "sum", dist.group.WORLD), SHAPES, strict=True):
        equal(_done(found), _sum(shape, torch.float32), shape)
    gathered = funcol.all_gather_into_tensor_coalesced(given, dist.group.WORLD)
    for found, shape in zip(gathered, SHAPES, strict=True):
        equal(_done(found), torch.cat(everybodys(shape, torch.float32)), shape)
    whole = [mine("contiguous", (SIZE * shape[0], *shape[1:]), torch.float32) for shape in SHAPES]
    parts = funcol.reduce_scatter_tensor_coalesced(whole, "sum", [0] * len(whole), dist.group.WORLD)
    for found, one in zip(parts, whole, strict=True):
        expected = torch.stack(everybodys(one.shape, torch.float32)).sum(0).chunk(SIZE)[RANK]
        equal(_done(found), expected, one.shape)


@SEVERAL
def test_functional_averages() -> None:
    with as_far_as_gloo_can():
        found = _done(funcol.all_reduce(mine("contiguous", (4,), torch.float32), "avg", dist.group.WORLD))
    equal(found, _sum((4,), torch.float32) / SIZE)
