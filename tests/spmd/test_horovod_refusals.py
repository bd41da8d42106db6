"""What one rank's arguments make impossible fails on every rank, at once, and what follows is right again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dear as hvd


class _Unpicklable:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("of all things")


_registered = hvd.ProcessSet([0])


def _ones() -> torch.Tensor:
    return torch.ones(3)


def _sparse(tensor: torch.Tensor, op: Any) -> torch.Tensor:
    return hvd.sparse_allreduce_async(tensor, "sparse", op)()


# What most ranks call; what the last one does, and its own error.
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], type[Exception]]] = {
    "more than there is memory for": (
        lambda: hvd.allreduce(_ones()),
        lambda: hvd.allreduce(torch.zeros(1).expand(10**14)),
        RuntimeError,
    ),
    "nothing to compress": (
        lambda: hvd.allreduce(_ones(), compression=hvd.Compression.fp16),
        lambda: hvd.allreduce(None, compression=hvd.Compression.fp16),  # type: ignore[arg-type]
        AttributeError,
    ),
    "no compressor": (
        lambda: hvd.reducescatter(_ones()),
        lambda: hvd.reducescatter(_ones(), compression=None),  # type: ignore[arg-type]
        TypeError,
    ),
    "no group": (
        lambda: hvd.grouped_allreduce([_ones()]),
        lambda: hvd.grouped_allreduce(None),  # type: ignore[arg-type]
        TypeError,
    ),
    "quantized": (
        lambda: hvd.broadcast(_ones(), 0),
        lambda: hvd.broadcast(torch.quantize_per_tensor(_ones(), 0.1, 0, torch.qint8), 0),
        ValueError,
    ),
    "a dense sparse one": (
        lambda: _sparse(_ones().to_sparse(), hvd.Sum),
        lambda: _sparse(_ones(), hvd.Sum),
        ValueError,
    ),
    "an average of a dense sparse one": (
        lambda: _sparse(_ones().to_sparse(), hvd.Average),
        lambda: _sparse(_ones(), hvd.Average),
        ValueError,
    ),
    "a set with a rank twice": (
        lambda: hvd.add_process_set([0]),
        lambda: hvd.add_process_set([0, 0]),
        ValueError,
    ),
    "no set": (
        lambda: hvd.remove_process_set(_registered),
        lambda: hvd.remove_process_set(3),  # type: ignore[arg-type]
        TypeError,
    ),
    "no pickle": (
        lambda: hvd.allgather_object(1),
        lambda: hvd.allgather_object(_Unpicklable()),
        ZeroDivisionError,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_on_one_rank_reaches_all(case: str) -> None:
    hvd.init()
    if case == "no set" and hvd.size() > 1:
        hvd.add_process_set(_registered)
    right, wrong, error = CASES[case]
    if hvd.rank() == hvd.size() - 1:
        with pytest.raises(error):
            wrong()
    else:
        with pytest.raises(hvd.HorovodInternalError, match=f"refused on rank {hvd.size() - 1}"):
            right()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name=f"after {case}").tolist() == [hvd.size()] * 2
    hvd.remove_process_set(_registered)  # where it is registered, which no refusal has changed


def _last() -> int:
    """1 on the last rank, which calls something else than the others; 0 on these."""
    return int(hvd.rank() == hvd.size() - 1)


def _left_alone(start: Callable[[], int]) -> None:
    """A script that never asks for the result."""
    handle = start()
    while not hvd.poll(handle):
        time.sleep(0.001)
    raise hvd.HorovodInternalError


def _sparse_of(size: int, name: str) -> torch.Tensor:
    return hvd.sparse_allreduce_async(torch.ones(size).to_sparse(), name, hvd.Sum)().to_dense()


# A call that fails on every rank, and one of the same name that does not, which gives a row of as many ones as ranks.
FAILURES: dict[str, tuple[Callable[[str], Any], Callable[[str], torch.Tensor]]] = {
    "allreduce, shapes": (
        lambda name: hvd.allreduce(torch.ones(2 + _last()), name=name),
        lambda name: hvd.allreduce(torch.ones(hvd.size()), name=name),
    ),
    "allreduce_, dtypes": (
        lambda name: hvd.allreduce_(torch.ones(2, dtype=[torch.float32, torch.int64][_last()]), name=name),
        lambda name: hvd.allreduce_(torch.ones(hvd.size()), name=name),
    ),
    "allreduce, an unknown op": (
        lambda name: hvd.allreduce(torch.ones(2), op=[hvd.Sum, "sum"][_last()], name=name),
        lambda name: hvd.allreduce(torch.ones(hvd.size()), name=name),
    ),
    "grouped_allreduce, numbers": (
        lambda name: hvd.grouped_allreduce([torch.ones(2)] * (1 + _last()), name=name),
        lambda name: hvd.grouped_allreduce([torch.ones(hvd.size())] * 2, name=name)[1],
    ),
    "grouped_allreduce, shapes": (
        lambda name: hvd.grouped_allreduce([torch.ones(2), torch.ones(2 + _last())], name=name),
        lambda name: hvd.grouped_allreduce([torch.ones(hvd.size())] * 2, name=name)[1],
    ),
    "an allreduce nobody waits for": (
        lambda name: _left_alone(lambda: hvd.allreduce_async(torch.ones(2 + _last()), name=name)),
        lambda name: hvd.synchronize(hvd.allreduce_async(torch.ones(hvd.size()), name=name)),
    ),
    "a group nobody waits for": (
        lambda name: _left_alone(lambda: hvd.grouped_allreduce_async_([torch.ones(2 + _last())], name=name)),
        lambda name: hvd.synchronize(hvd.grouped_allreduce_async_([torch.ones(hvd.size())], name=name))[0],
    ),
    "broadcast, shapes": (
        lambda name: hvd.broadcast(torch.ones(2 + _last()), 0, name=name),
        lambda name: hvd.broadcast(torch.ones(hvd.size()), 0, name=name),
    ),
    "broadcast, roots": (
        lambda name: hvd.broadcast(torch.ones(2), _last(), name=name),
        lambda name: hvd.broadcast(torch.ones(hvd.size()), 0, name=name),
    ),
    "broadcast_, a root that is no rank": (
        lambda name: hvd.broadcast_(torch.ones(2), hvd.size(), name=name),
        lambda name: hvd.broadcast_(torch.ones(hvd.size()), hvd.size() - 1, name=name),
    ),
    "broadcast_async_, a root that one rank gives": (
        lambda name: hvd.synchronize(hvd.broadcast_async_(torch.ones(2), -_last(), name=name)),
        lambda name: hvd.synchronize(hvd.broadcast_async_(torch.ones(hvd.size()), 0, name=name)),
    ),
    "broadcast_object, a root that is no rank": (
        lambda name: hvd.broadcast_object(1, hvd.size(), name=name),
        lambda name: torch.ones(hvd.broadcast_object(hvd.size(), 0, name=name)),
    ),
    "broadcast_parameters, a root that is no rank": (
        lambda name: hvd.broadcast_parameters({name: torch.ones(2)}, hvd.size()),
        lambda name: (found := {name: torch.ones(hvd.size())}, hvd.broadcast_parameters(found, 0))[0][name],
    ),
    "broadcast_parameters, shapes": (
        lambda name: hvd.broadcast_parameters({name: torch.ones(2 + _last())}, 0),
        lambda name: (found := {name: torch.ones(hvd.size())}, hvd.broadcast_parameters(found, 0))[0][name],
    ),
    "allgather, shapes": (
        lambda name: hvd.allgather(torch.ones(1, 2 + _last()), name=name),
        lambda name: hvd.allgather(torch.ones(1), name=name),
    ),
    "allgather_async, ranks of tensors": (
        lambda name: hvd.synchronize(hvd.allgather_async(torch.ones([(2,), (2, 1)][_last()]), name=name)),
        lambda name: hvd.synchronize(hvd.allgather_async(torch.ones(1), name=name)),
    ),
    "grouped_allgather, numbers": (
        lambda name: hvd.grouped_allgather([torch.ones(2)] * (1 + _last()), name=name),
        lambda name: hvd.grouped_allgather([torch.ones(1)] * 2, name=name)[1],
    ),
    "alltoall, splits": (
        lambda name: hvd.alltoall(torch.ones(hvd.size()), torch.tensor([1 + _last()] * hvd.size()), name=name),
        lambda name: hvd.alltoall(torch.ones(hvd.size()), name=name),
    ),
    "alltoall, shapes": (
        lambda name: hvd.alltoall(torch.ones(hvd.size(), 2 + _last()), name=name),
        lambda name: hvd.alltoall(torch.ones(hvd.size()), torch.ones(hvd.size(), dtype=torch.int32), name=name)[0],
    ),
    "reducescatter, shapes": (
        lambda name: hvd.reducescatter(torch.ones(4, 2 + _last()), name=name),
        lambda name: hvd.reducescatter(torch.ones(hvd.size() ** 2), name=name),
    ),
    "grouped_reducescatter, shapes": (
        lambda name: hvd.grouped_reducescatter([torch.ones(4), torch.ones(4 + _last())], name=name),
        lambda name: hvd.grouped_reducescatter([torch.ones(hvd.size() ** 2)] * 2, name=name)[1],
    ),
    "sparse_allreduce_async, shapes": (
        lambda name: _sparse_of(2 + _last(), name),
        lambda name: _sparse_of(hvd.size(), name) / hvd.size(),
    ),
}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("case", FAILURES)
def test_after_a_failed_call_the_next_one_is_right(case: str, named: bool) -> None:
    hvd.init()
    if hvd.size() == 1:
        return
    wrong, right = FAILURES[case]
    name = case if named or case.startswith(("broadcast_parameters", "sparse")) else None
    for _ in range(2):
        with pytest.raises((hvd.HorovodInternalError, ValueError, TypeError)):
            wrong(name)
        assert right(name).tolist() == [1.0] * hvd.size()
