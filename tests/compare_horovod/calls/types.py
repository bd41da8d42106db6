"""Every operation with every type of element."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.compare_horovod.calls.call import Calls, ramp

__all__ = ["CALLS"]

TYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.complex64,
)


def _in_place(hvd: Any, x: torch.Tensor, size: int) -> Any:
    result = hvd.allreduce_(x)
    return [result, x, result is x]


OPERATIONS: dict[str, Callable[[Any, torch.Tensor, int], Any]] = {
    "allreduce": lambda hvd, x, n: hvd.allreduce(x),
    "allreduce Average": lambda hvd, x, n: hvd.allreduce(x, op=hvd.Average),
    "allreduce Sum": lambda hvd, x, n: hvd.allreduce(x, op=hvd.Sum),
    "allreduce Min": lambda hvd, x, n: hvd.allreduce(x, op=hvd.Min),
    "allreduce Max": lambda hvd, x, n: hvd.allreduce(x, op=hvd.Max),
    "allreduce Product": lambda hvd, x, n: hvd.allreduce(x, op=hvd.Product),
    "allreduce in place": _in_place,
    "allreduce prescaled": lambda hvd, x, n: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5),
    "allreduce postscaled": lambda hvd, x, n: hvd.allreduce(x, op=hvd.Sum, postscale_factor=0.5),
    "allreduce with both factors": lambda hvd, x, n: hvd.allreduce(x, prescale_factor=3.0, postscale_factor=0.5),
    "grouped_allreduce": lambda hvd, x, n: hvd.grouped_allreduce([x, x + x]),
    "allgather": lambda hvd, x, n: hvd.allgather(x[: 1 + hvd.rank()]),
    "broadcast": lambda hvd, x, n: hvd.broadcast(x, n - 1),
    "alltoall": lambda hvd, x, n: hvd.alltoall(x[:n]),
    "reducescatter": lambda hvd, x, n: hvd.reducescatter(x),
    "reducescatter Sum": lambda hvd, x, n: hvd.reducescatter(x, op=hvd.Sum),
    "grouped_allgather": lambda hvd, x, n: hvd.grouped_allgather([x, x[:1]]),
    "grouped_reducescatter": lambda hvd, x, n: hvd.grouped_reducescatter([x, x + x]),
}


def _call(
    operation: Callable[[Any, torch.Tensor, int], Any], dtype: torch.dtype, hvd: Any, rank: int, size: int
) -> Any:
    return operation(hvd, ramp(5, rank, dtype), size)


CALLS: Calls = {
    f"{name} of {str(dtype).removeprefix('torch.')}": partial(_call, operation, dtype)
    for dtype in TYPES
    for name, operation in OPERATIONS.items()
}
