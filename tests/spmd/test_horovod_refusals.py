"""What one rank's arguments make impossible fails on every rank, at once, and what follows is right again."""

from __future__ import annotations

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
