"""Reduces CPU tensors element by element with comm_core's rules, where gloo carries them.

16-bit floats are summed in fp32 and rounded once. An average is the sum over the size in the accumulation type, rounded
once, as over MPI.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from comm_core import ReduceOp

__all__: list[str] = []

# torch hands element-wise work of this many elements to its OpenMP pool; below it the calling thread does it alone.
# Waking that pool from our thread would take the cores from the backward pass.
_SERIAL_NUMEL = 32768 - 64


def is_half(dtype: torch.dtype) -> bool:
    """Whether partial sums in this type would round at every step."""
    return dtype in (torch.float16, torch.bfloat16)


def combine_all(op: ReduceOp, parts: Sequence[torch.Tensor], out: torch.Tensor, size: int) -> None:
    """`out` becomes the reduction of `parts` in their order, the average's division by `size` included."""
    wide = torch.float32 if is_half(out.dtype) else out.dtype
    for part in _serial_parts(out.numel()):
        total = parts[0][part].to(wide, copy=True)
        for other in parts[1:]:
            _combine(op, total, other[part], total)
        if op is ReduceOp.AVG:
            # Powers of two have an exact inverse, and a product takes a fraction of the time.
            out[part].copy_(total / size if size & (size - 1) else total * (1.0 / size))
        else:
            out[part].copy_(total)


def _combine(op: ReduceOp, first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> None:
    boolean = out.dtype is torch.bool
    if op is ReduceOp.SUM or op is ReduceOp.AVG:
        (torch.logical_or if boolean else torch.add)(first, second, out=out)
    elif op is ReduceOp.PROD:
        (torch.logical_and if boolean else torch.mul)(first, second, out=out)
    elif op is ReduceOp.MIN:
        torch.minimum(first, second, out=out)
    else:
        torch.maximum(first, second, out=out)


def _serial_parts(numel: int) -> Iterator[slice]:
    step = max(numel, 1) if torch.get_num_threads() == 1 else _SERIAL_NUMEL
    return (slice(start, min(start + step, numel)) for start in range(0, numel, step))
