"""The backend of these tests, groups of a test, and the tensors that each rank has."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.spmd_plugin import RANK, SIZE

BACKEND = os.environ.get("DEAR_TEST_C10D", "dear")
OVER_GLOO = BACKEND == "gloo"
SEVERAL = pytest.mark.skipif(SIZE == 1, reason="takes several ranks")
FOUR = pytest.mark.skipif(SIZE != 4, reason="takes four ranks")
NO_GAPS = pytest.mark.skipif(OVER_GLOO, reason="gloo takes what lies between for elements")
ALL = list(range(SIZE))

# Newer versions of torch call them by other names, and warn of the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.int8)
REDUCED = (*FLOATS, *INTEGERS)
MOVED = (*REDUCED, torch.bool, torch.complex64)


def fails_before(version: str) -> pytest.MarkDecorator:
    """Of tests that fail over gloo, too, with any torch before `version`."""
    return pytest.mark.skipif(torch.__version__ < version, reason=f"fails before torch {version}, over gloo, too")


def register() -> None:
    """The one line that a script has beside torch's own."""
    if not OVER_GLOO:
        importlib.import_module("dear.backend")


def init(**options: Any) -> None:
    dist.init_process_group(BACKEND, **{"timeout": timedelta(seconds=20), **options})


@contextlib.contextmanager
def group_of(ranks: Sequence[int] = ALL, **options: Any) -> Iterator[Any]:
    """A group while the context lasts, ``None`` for ranks outside it. On every rank."""
    group = dist.new_group(list(ranks), **options)
    member = group is not dist.GroupMember.NON_GROUP_MEMBER
    yield group if member else None
    if member:
        dist.destroy_process_group(group)


@contextlib.contextmanager
def as_far_as_gloo_can() -> Iterator[None]:
    """Gloo says of some calls that it has them not, on every rank and before it sends."""
    try:
        yield
    except (RuntimeError, ValueError, NotImplementedError) as error:
        lacks = ("support", "nvalid", "implement", "Unhandled", "Check failed", "equally sized", "same size")
        if OVER_GLOO and any(word in str(error) for word in lacks):
            pytest.skip("gloo has it not")
        raise


def contents(rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What a rank has in its tensor: small whole numbers, of which sums and products are exact in every dtype."""
    numbers = (torch.arange(torch.Size(shape).numel()) * 3 + rank) % 4 + rank % 2
    if dtype is torch.bool:
        return (numbers % 2 == 0).reshape(shape)
    if dtype.is_complex:
        return torch.complex(numbers.float(), -numbers.float() - 1).to(dtype).reshape(shape)
    return numbers.to(dtype).reshape(shape)


def everybodys(shape: Sequence[int], dtype: torch.dtype, ranks: Sequence[int] = ALL) -> list[torch.Tensor]:
    return [contents(rank, shape, dtype) for rank in ranks]


def plain(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def transposed(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Dense, but in another order."""
    return torch.empty(list(reversed(shape)), dtype=dtype).permute(*reversed(range(len(shape))))


def with_gaps(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Every second element of other memory."""
    return torch.empty([*shape[:-1], 2 * shape[-1]], dtype=dtype)[..., ::2]


LAYOUTS: dict[str, Callable[[Sequence[int], torch.dtype], torch.Tensor]] = {
    "contiguous": plain,
    "transposed": transposed,
    "gaps": with_gaps,
}


def mine(layout: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """This rank's tensor, in memory of that layout."""
    return LAYOUTS[layout](shape, dtype).copy_(contents(RANK, shape, dtype))


def blank(layout: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a result, with something else in it."""
    return LAYOUTS[layout](shape, dtype).fill_(77 if dtype is not torch.bool else True)


def equal(found: torch.Tensor, expected: torch.Tensor, case: object = "") -> None:
    assert found.dtype == expected.dtype, f"{case}: {found.dtype}, and not {expected.dtype}"
    assert torch.equal(found, expected), f"{case}: rank {RANK} has {found}, and not {expected}"


def same_everywhere(values: Sequence[torch.Tensor]) -> None:
    """Bit for bit what rank 0 has. On every rank."""
    for number, value in enumerate(values):
        others = value.detach().clone().contiguous()
        dist.broadcast(others, 0)
        assert torch.equal(others, value), f"tensor {number} of rank {RANK} differs from rank 0's"


_meetings = 0


def meet() -> None:
    """All ranks, through the store: no operation of any group."""
    global _meetings
    _meetings += 1
    store = dist.distributed_c10d._get_default_store()
    if store.add(f"met/{_meetings}", 1) == SIZE:
        store.set(f"met/{_meetings}/all", "yes")
    store.wait([f"met/{_meetings}/all"])
