"""Casts, averages and inspections of flat tensors: our CUDA kernels where they can be used, else torch's foreach functions.

Both give the same values but for the last bits of a sum of squares, whose order of addition is fixed in our kernels and
torch's own choice elsewhere. Nothing here waits for a device.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch

import comm_core
from comm_core.cuda_kernels import CudaKernels, cast_name
from overlap.transport.checks import DTYPES
from overlap.transport.reduction import is_half

__all__ = ["can_inspect", "cast_scale", "divide", "inspect", "kernels_on", "prefers_inspect"]

log = logging.getLogger("dear")

_TYPES = {dtype: DTYPES[dtype] for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


@functools.cache
def kernels_on(device: int) -> CudaKernels | None:
    """Our kernels on a CUDA device; None, with a line in the log that says why, where torch's functions are used."""
    try:
        return CudaKernels(device)
    except comm_core.Error as reason:
        log.info("torch's own functions cast and inspect on CUDA device %d: %s", device, reason)
        return None


def cast_scale(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    """targets[i] = sources[i] times `scale`, rounded to the nearest value of its type, ties to even.

    Flat, contiguous tensors of floating point, pairwise of one size and device; a target may be its source. 16-bit types
    are multiplied in fp32. On the current stream of each device.

    Raises ``comm_core.InvalidUsage`` for a scale that is not above 0, and for tensors that do not fit each other.
    """
    if not scale > 0:
        raise comm_core.InvalidUsage(f"cast_scale: scale should be above 0 and is {scale}")
    if len(targets) != len(sources):
        raise comm_core.InvalidUsage(f"cast_scale: {len(targets)} targets for {len(sources)} sources")
    rest: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target, source in zip(targets, sources, strict=True):
        _check("cast_scale", target)
        _check("cast_scale", source)
        if target.numel() != source.numel() or target.device != source.device:
            raise comm_core.InvalidUsage(
                f"cast_scale: a target has {target.numel()} elements on {target.device}, its source {source.numel()} on "
                f"{source.device}"
            )
        kernels = kernels_on(_index(source)) if source.is_cuda else None
        if kernels is None or cast_name(_TYPES[source.dtype], _TYPES[target.dtype]) is None:
            rest.append((target, source))
            continue
        kernels.cast(
            source.data_ptr(),
            _TYPES[source.dtype],
            target.data_ptr(),
            _TYPES[target.dtype],
            source.numel(),
            scale,
            torch.cuda.current_stream(source.device).cuda_stream,
        )
    rest = [(target, source) for target, source in rest if source.numel()]
    if rest:
        wide = _wide(rest)
        _round_by_torch(rest, wide if scale == 1 else list(torch._foreach_mul(wide, scale)))


def divide(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], count: int) -> None:
    """targets[i] = sources[i] divided by `count`, with the bits of the host's averages; otherwise as :func:`cast_scale`.

    A product with 1 / `count` has them where that is a power of two: elsewhere a third of the values would be one unit in
    the last place off.
    """
    if count & (count - 1) == 0:
        cast_scale(targets, sources, 1.0 / count)
        return
    pairs = list(zip(targets, sources, strict=True))
    _round_by_torch(pairs, list(torch._foreach_div(_wide(pairs), float(count))))


def _wide(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    return [source.float() if is_half(source.dtype) else source for _, source in pairs]


def _round_by_torch(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], wide: list[torch.Tensor]) -> None:
    for values, (target, _) in zip(wide, pairs, strict=True):
        target.copy_(values)


def inspect(tensors: Sequence[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """Sum of squares of all elements, and how many are infinite or NaN: two float64 on the tensors' device.

    Flat, contiguous tensors of floating point on one device; `device` is where the answer lies if there are none. Squares
    are added up in float64, in one pass over the data where our kernels can be used.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]
    for tensor in filled:
        _check("inspect", tensor)
        if tensor.device != filled[0].device:
            raise comm_core.InvalidUsage(f"inspect: tensors are on {filled[0].device} and on {tensor.device}")
    if not filled:
        return torch.zeros(2, dtype=torch.float64, device=tensors[0].device if tensors else device)
    kernels = kernels_on(_index(filled[0])) if filled[0].is_cuda else None
    if kernels is None:
        return _inspect_by_torch(filled)
    place = filled[0].device
    found = torch.empty(2, dtype=torch.float64, device=place)
    scratch = torch.empty(kernels.scratch_bytes([t.numel() for t in filled]), dtype=torch.uint8, device=place)
    kernels.inspect(
        [(tensor.data_ptr(), _TYPES[tensor.dtype], tensor.numel()) for tensor in filled],
        scratch.data_ptr(),
        found.data_ptr(),
        torch.cuda.current_stream(place).cuda_stream,
    )
    return found


def _inspect_by_torch(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    squares = torch.stack([norm.square() for norm in torch._foreach_norm(list(tensors), 2, dtype=torch.float64)]).sum()
    nonfinite = torch.stack([(~torch.isfinite(tensor)).sum() for tensor in tensors]).sum()
    return torch.stack([squares, nonfinite.double()])


def can_inspect(tensor: torch.Tensor) -> bool:
    """Whether :func:`inspect` takes this tensor."""
    return tensor.dtype in _TYPES and tensor.layout is torch.strided and tensor.is_contiguous()


def prefers_inspect(tensor: torch.Tensor) -> bool:
    """Whether :func:`inspect` is the fastest way to read a tensor: on a GPU, where one pass for all is cheaper."""
    return tensor.is_cuda and can_inspect(tensor)


def _check(what: str, tensor: torch.Tensor) -> None:
    if not can_inspect(tensor):
        raise comm_core.InvalidUsage(
            f"{what} takes contiguous tensors of {', '.join(str(dtype) for dtype in _TYPES)}, got {tensor.dtype} with "
            f"shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        )


def _index(tensor: torch.Tensor) -> int:
    return int(tensor.get_device())
