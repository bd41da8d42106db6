"""The collectives: every type of element, every kind of argument, and the gradient of every one's input."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from tests.compare_horovod.calls.call import Calls, gradient, ones, ramp

__all__ = ["ARGUMENTS", "TYPES"]

_TYPES = (
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


_OPERATIONS: dict[str, Callable[[Any, torch.Tensor, int], Any]] = {
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


def _of_type(
    operation: Callable[[Any, torch.Tensor, int], Any], dtype: torch.dtype, hvd: Any, rank: int, size: int
) -> Any:
    return operation(hvd, ramp(5, rank, dtype), size)


TYPES: Calls = {
    f"{name} of {str(dtype).removeprefix('torch.')}": partial(_of_type, operation, dtype)
    for dtype in _TYPES
    for name, operation in _OPERATIONS.items()
}


def _window(hvd: Any, collective: Any, r: int) -> Any:
    """An in-place operation on every second column of a tensor: what lies between must stay."""
    whole = ramp(12, r).view(3, 4)
    result = collective(whole[:, ::2])
    return [result, whole]


def _turned(collective: Any, r: int) -> Any:
    whole = ramp(6, r).view(2, 3)
    result = collective(whole.t())
    return [result, whole]


def _twice_under_one_name(hvd: Any, r: int, n: int) -> Any:
    """The first waits for the last rank, so that it is under way when its name is used again."""
    if r == n - 1 and n > 1:
        time.sleep(0.3)
        return hvd.allreduce(ones(2), name="twice")
    first = hvd.allreduce_async(ones(2), name="twice")
    if n == 1:
        return hvd.synchronize(first)
    try:
        hvd.allreduce_async(ones(2), name="twice")
        second: Any = "taken"
    except ValueError:
        second = "ValueError"
    return [second, hvd.synchronize(first)]


def _polled(hvd: Any, r: int, n: int) -> Any:
    handle = hvd.allreduce_async(ones(2))
    deadline = time.monotonic() + 5
    while not hvd.poll(handle) and time.monotonic() < deadline:
        time.sleep(0.002)
    return [hvd.poll(handle), hvd.synchronize(handle)]


def _after_synchronize(hvd: Any, ask: str) -> Any:
    handle = hvd.allreduce_async(ones(2))
    hvd.synchronize(handle)
    return getattr(hvd, ask)(handle)


def _kinds(hvd: Any, r: int, n: int) -> Any:
    handles = (hvd.allreduce_async(ones(2)), hvd.allgather_async(ones(2)), hvd.broadcast_async(ones(2), 0))
    return [[type(handle).__name__, hvd.synchronize(handle)] for handle in handles]


def _same_name_of_two_operations(hvd: Any, r: int, n: int) -> Any:
    handles = hvd.allreduce_async(ones(3), name="k"), hvd.allgather_async(ones(1), name="k")
    return [hvd.synchronize(handle) for handle in handles]


def _grouped_in_place(hvd: Any, r: int, n: int) -> Any:
    tensors = [ones(2) * r, ramp(3, r)]
    return [list(hvd.grouped_allreduce_(tensors)), tensors]


def _leaf(hvd: Any, r: int, n: int) -> Any:
    result = hvd.synchronize(hvd.allreduce_async((ones(2) * (r + 1)).requires_grad_()))
    return [result, result.requires_grad, result.is_leaf]


def _parameter(hvd: Any, r: int, n: int) -> Any:
    parameter = torch.nn.Parameter(ones(2) * r)
    hvd.broadcast_(parameter.data, n - 1)
    return parameter


def _sparse(r: int) -> torch.Tensor:
    return (torch.eye(2) * (r + 1)).to_sparse()


REDUCTIONS: Calls = {
    "average=True": lambda hvd, r, n: hvd.allreduce(ramp(2, r), average=True),
    "average=False": lambda hvd, r, n: hvd.allreduce(ramp(2, r), average=False),
    "average=1": lambda hvd, r, n: hvd.allreduce(ramp(2, r), average=1),
    "average=, op=": lambda hvd, r, n: hvd.allreduce(ramp(2, r), average=True, op=hvd.Sum),
    "op=77": lambda hvd, r, n: hvd.allreduce(ramp(2, r), op=77),
    'op="sum"': lambda hvd, r, n: hvd.allreduce(ramp(2, r), op="sum"),
    "op=Adasum": lambda hvd, r, n: hvd.allreduce(ramp(2, r), op=hvd.Adasum),
    "reducescatter Min": lambda hvd, r, n: hvd.reducescatter(ramp(n, r), op=hvd.Min),
    "reducescatter op=None": lambda hvd, r, n: hvd.reducescatter(ramp(n, r), op=None),
    "reducescatter op=77": lambda hvd, r, n: hvd.reducescatter(ramp(n, r), op=77),
    "reducescatter with factors": lambda hvd, r, n: hvd.reducescatter(
        ramp(4, r), op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5
    ),
    "fractions, summed": lambda hvd, r, n: hvd.allreduce(torch.tensor([0.1, 0.7, 1e-30]) * (r + 1), op=hvd.Sum),
    "fractions, averaged": lambda hvd, r, n: hvd.allreduce(torch.tensor([0.1, 0.7, 1e-30]) * (r + 1)),
    "infinity and NaN": lambda hvd, r, n: hvd.allreduce(torch.tensor([float("inf"), float("nan"), -0.0])),
    "fp16 on the wire": lambda hvd, r, n: hvd.allreduce(
        torch.tensor([1e-9, 1.1, 2000.3]) * (r + 1), compression=hvd.Compression.fp16
    ),
    "fp16 on the wire, grouped": lambda hvd, r, n: hvd.grouped_allreduce(
        [torch.tensor([1.1, 2000.3]) * (r + 1)], compression=hvd.Compression.fp16
    ),
    "fp16 on the wire, reducescatter": lambda hvd, r, n: hvd.reducescatter(
        torch.tensor([1.1, 2000.3, 7.0, 0.3]) * (r + 1), compression=hvd.Compression.fp16
    ),
    'compression="fp16"': lambda hvd, r, n: hvd.allreduce(ones(1), compression="fp16"),
    "sparse, averaged": lambda hvd, r, n: hvd.sparse_allreduce_async(_sparse(r), name="sa", op=hvd.Average)(),
    "sparse, summed": lambda hvd, r, n: hvd.sparse_allreduce_async(_sparse(r), name="ss", op=hvd.Sum)(),
    "sparse, Min": lambda hvd, r, n: hvd.sparse_allreduce_async(_sparse(r), name="sm", op=hvd.Min)(),
    "sparse as dense": lambda hvd, r, n: hvd.allreduce(_sparse(r), name="sd"),
}

SHAPES: Calls = {
    "scalar allreduce": lambda hvd, r, n: hvd.allreduce(torch.tensor(1.0 + r)),
    "scalar allgather": lambda hvd, r, n: hvd.allgather(torch.tensor(1.0 + r)),
    "scalar broadcast": lambda hvd, r, n: hvd.broadcast(torch.tensor(1.0 + r), 0),
    "scalar reducescatter": lambda hvd, r, n: hvd.reducescatter(torch.tensor(1.0 + r)),
    "scalar alltoall": lambda hvd, r, n: hvd.alltoall(torch.tensor(1.0 + r)),
    "no elements, allreduce": lambda hvd, r, n: hvd.allreduce(ones(0, 3)),
    "no elements on rank 0, allgather": lambda hvd, r, n: hvd.allgather(ones(r, 2)),
    "no elements, allgather": lambda hvd, r, n: hvd.allgather(ones(0, 2)),
    "no elements, broadcast": lambda hvd, r, n: hvd.broadcast(ones(0, 2), 0),
    "no elements, reducescatter": lambda hvd, r, n: hvd.reducescatter(ones(0, 2)),
    "no elements, alltoall": lambda hvd, r, n: hvd.alltoall(ones(0, 2)),
    "uneven reducescatter": lambda hvd, r, n: hvd.reducescatter(ramp(10, r).view(5, 2), op=hvd.Sum),
    "reducescatter of one row": lambda hvd, r, n: hvd.reducescatter(ramp(2, r).view(1, 2), op=hvd.Sum),
    "turned allreduce": lambda hvd, r, n: hvd.allreduce(ramp(6, r).view(2, 3).t()),
    "turned allreduce in place": lambda hvd, r, n: _turned(hvd.allreduce_, r),
    "turned broadcast in place": lambda hvd, r, n: _turned(lambda x: hvd.broadcast_(x, n - 1), r),
    "turned allgather": lambda hvd, r, n: hvd.allgather(ramp(6, r).view(2, 3).t()),
    "turned alltoall": lambda hvd, r, n: hvd.alltoall(ramp(8, r).view(2, 4).t()),
    "turned grouped_allreduce_": lambda hvd, r, n: _turned(lambda x: list(hvd.grouped_allreduce_([x])), r),
    "columns allreduce in place": lambda hvd, r, n: _window(hvd, hvd.allreduce_, r),
    "columns broadcast in place": lambda hvd, r, n: _window(hvd, lambda x: hvd.broadcast_(x, n - 1), r),
    "large allreduce": lambda hvd, r, n: hvd.allreduce(ones(1 << 20) * (r + 1), op=hvd.Sum).sum(),
}

WHO_AND_WHAT: Calls = {
    "root -1": lambda hvd, r, n: hvd.broadcast(ones(2), -1, name="r-1"),
    "root size": lambda hvd, r, n: hvd.broadcast(ones(2), n, name="rn"),
    'root "0"': lambda hvd, r, n: hvd.broadcast(ones(2), "0", name="rs"),
    "root True": lambda hvd, r, n: hvd.broadcast(ones(2) * r, n > 1, name="rb"),
    "not a tensor": lambda hvd, r, n: hvd.allreduce([1.0, 2.0], name="list"),
    "a numpy array": lambda hvd, r, n: hvd.allreduce(np.ones(2), name="array"),
    "a meta tensor": lambda hvd, r, n: hvd.allreduce(torch.ones(2, device="meta"), name="meta"),
    "name=5": lambda hvd, r, n: hvd.allreduce(ones(2), name=5),
    'name=""': lambda hvd, r, n: hvd.allreduce(ones(2), name=""),
    'name="größe"': lambda hvd, r, n: hvd.allreduce(ones(2), name="größe"),
    "in place on a leaf": lambda hvd, r, n: hvd.allreduce_(ones(2).requires_grad_()),
    "asynchronously, of a leaf": _leaf,
    "a parameter's data": _parameter,
}

HANDLES: Calls = {
    "a name for two operations": _same_name_of_two_operations,
    "poll": _polled,
    "poll afterwards": lambda hvd, r, n: _after_synchronize(hvd, "poll"),
    "synchronize afterwards": lambda hvd, r, n: _after_synchronize(hvd, "synchronize"),
    "poll(123456)": lambda hvd, r, n: hvd.poll(123456),
    "synchronize(123456)": lambda hvd, r, n: hvd.synchronize(123456),
    "handles": _kinds,
    "barrier": lambda hvd, r, n: hvd.barrier(),
}

GROUPED: Calls = {
    "grouped handle": lambda hvd, r, n: type(hvd.grouped_allreduce_async([ones(2)], name="gh")).__name__,
    "grouped_allreduce_async": lambda hvd, r, n: hvd.synchronize(hvd.grouped_allreduce_async([ones(2), ones(1)])),
    "grouped_allreduce": lambda hvd, r, n: hvd.grouped_allreduce([ones(2) * r, ones(1)]),
    "grouped_allreduce of a tuple": lambda hvd, r, n: hvd.grouped_allreduce((ones(2) * r, ones(1))),
    "grouped_allreduce, named": lambda hvd, r, n: hvd.grouped_allreduce([ones(2) * r, ones(1)], name="gn"),
    "grouped_allreduce of two types": lambda hvd, r, n: hvd.grouped_allreduce([ones(2), ones(2).double() * r]),
    "grouped_allreduce_": _grouped_in_place,
    "class of grouped_allreduce_": lambda hvd, r, n: type(hvd.grouped_allreduce_([ones(2)])).__name__,
    "grouped_allgather": lambda hvd, r, n: hvd.grouped_allgather([ones(r + 1), ones(1, 2) * r]),
    "grouped_reducescatter": lambda hvd, r, n: hvd.grouped_reducescatter([ramp(4), ones(5) * r], op=hvd.Sum),
    "grouped_allreduce of nothing": lambda hvd, r, n: hvd.grouped_allreduce([]),
    "grouped_allgather of nothing": lambda hvd, r, n: hvd.grouped_allgather([]),
}


def _uneven(n: int) -> list[int]:
    return [1] * (n - 1) + [2]


SPLITS: Calls = {
    "splits": lambda hvd, r, n: hvd.alltoall(ramp(n + 1, 10 * r), splits=_uneven(n)),
    "splits of 32 bits": lambda hvd, r, n: hvd.alltoall(
        ramp(n + 1, 10 * r), torch.tensor(_uneven(n), dtype=torch.int32)
    ),
    "splits of 64 bits": lambda hvd, r, n: hvd.alltoall(ramp(n + 1, 10 * r), torch.tensor(_uneven(n))),
    "no splits": lambda hvd, r, n: hvd.alltoall(ramp(2 * n, 10 * r)),
    "no splits, asynchronously": lambda hvd, r, n: hvd.synchronize(hvd.alltoall_async(ramp(2 * n, 10 * r))),
    "splits, asynchronously": lambda hvd, r, n: hvd.synchronize(hvd.alltoall_async(ramp(n + 1, r), splits=_uneven(n))),
    "all to the last": lambda hvd, r, n: hvd.alltoall(ramp(3, 10 * r), splits=[0] * (n - 1) + [3]),
    "splits of fewer rows": lambda hvd, r, n: hvd.alltoall(ramp(n + 2, 10 * r), splits=_uneven(n), name="few"),
    "splits of more rows": lambda hvd, r, n: hvd.alltoall(ramp(n, 10 * r), splits=_uneven(n), name="many"),
    "splits for one rank too many": lambda hvd, r, n: hvd.alltoall(ramp(n + 1), splits=[1] * (n + 1), name="long"),
    "negative splits": lambda hvd, r, n: hvd.alltoall(ramp(n), splits=[-1] * (n - 1) + [2 * n - 1], name="minus"),
    "rows that do not divide": lambda hvd, r, n: hvd.alltoall(ramp(2 * n + 1), name="rest"),
    "splits of floats": lambda hvd, r, n: hvd.alltoall(ramp(2 * n), splits=torch.full((n,), 2.0), name="floats"),
}

GRADIENTS: Calls = {
    "d allreduce": lambda hvd, r, n: gradient(lambda x: hvd.allreduce(x), 3, r),
    "d allreduce Sum": lambda hvd, r, n: gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), 3, r),
    "d allreduce Min": lambda hvd, r, n: gradient(lambda x: hvd.allreduce(x, op=hvd.Min), 3, r),
    "d allreduce with factors": lambda hvd, r, n: gradient(
        lambda x: hvd.allreduce(x, prescale_factor=2.0, postscale_factor=3.0), 3, r
    ),
    "d allreduce Sum with factors": lambda hvd, r, n: gradient(
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0), 3, r
    ),
    "d allreduce in fp16": lambda hvd, r, n: gradient(
        lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16), 3, r
    ),
    "d grouped_allreduce": lambda hvd, r, n: gradient(lambda x: hvd.grouped_allreduce([x, 2 * x]), 3, r),
    "d grouped_allreduce Sum": lambda hvd, r, n: gradient(
        lambda x: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum), 3, r
    ),
    "d allgather": lambda hvd, r, n: gradient(hvd.allgather, 2 + r, r, columns=2),
    "d grouped_allgather": lambda hvd, r, n: gradient(lambda x: hvd.grouped_allgather([x, 2 * x]), 2 + r, r, 2),
    "d broadcast from 0": lambda hvd, r, n: gradient(lambda x: hvd.broadcast(x, 0), 3, r),
    "d broadcast from the last": lambda hvd, r, n: gradient(lambda x: hvd.broadcast(x, n - 1), 3, r),
    "d alltoall": lambda hvd, r, n: gradient(lambda x: hvd.alltoall(x), 2 * n, r),
    "d alltoall with splits": lambda hvd, r, n: gradient(
        lambda x: hvd.alltoall(x, splits=[1] * (n - 1) + [2]), n + 1, r
    ),
    "d reducescatter": lambda hvd, r, n: gradient(lambda x: hvd.reducescatter(x), 4, r),
    "d reducescatter Sum": lambda hvd, r, n: gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), 4, r),
    "d uneven reducescatter": lambda hvd, r, n: gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), 5, r),
    "d reducescatter with factors": lambda hvd, r, n: gradient(
        lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0), 4, r
    ),
    "d grouped_reducescatter": lambda hvd, r, n: gradient(lambda x: hvd.grouped_reducescatter([x, 2 * x]), 4, r),
    "d grouped_reducescatter Sum": lambda hvd, r, n: gradient(
        lambda x: hvd.grouped_reducescatter([x, 2 * x], op=hvd.Sum), 4, r
    ),
}

ARGUMENTS: Calls = {
    **REDUCTIONS,
    **SHAPES,
    **WHO_AND_WHAT,
    **HANDLES,
    **GROUPED,
    **SPLITS,
    **GRADIENTS,
    # Here ranks make different numbers of calls, so unnamed calls behind it would not match.
    "a name twice": _twice_under_one_name,
}
