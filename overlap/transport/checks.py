"""Checks operations before anything is sent, and brings them into wire form.

Wire form is flat and of a dtype that comm_core knows: complex numbers as pairs of reals, and, where an operation only
moves bytes, other types as integers of the same width. It shares memory with the caller's tensor but neither its
autograd history nor its version counter: writing it is, for autograd, a write from outside, on every backend.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import product

import torch

from comm_core import DType, InvalidUsage, ReduceOp, Unsupported
from overlap.transport.operation import NOTHING, REDUCTIONS, Collective, Counts, Operation, Wide
from overlap.transport.reduction import is_half

#: What comm_core reduces and moves, and its names for these types.
DTYPES = {
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
    torch.int8: DType.INT8,
    torch.int16: DType.INT16,
    torch.int32: DType.INT32,
    torch.int64: DType.INT64,
    torch.uint8: DType.UINT8,
    torch.bool: DType.BOOL,
}

_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPLEX_OPS = (ReduceOp.SUM, ReduceOp.AVG)
_ROOTED = (Collective.BROADCAST, Collective.REDUCE)
_ROUNDED = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)


def checked(operation: Operation, rank: int, size: int, device: str = "cpu") -> Operation:
    """The operation of `rank`, of `size`, in wire form, with counts in elements of that, also where none were given.

    `device` is the type of device whose memory it moves. Who receives nothing of a reduction to one rank has
    :data:`NOTHING` as `recv`. Raises ``InvalidUsage`` or ``Unsupported``.
    """
    kind, what, send, recv = operation.kind, operation.kind.value, operation.send, operation.recv
    op = operation.op if kind in REDUCTIONS else None
    if op is not None and not isinstance(op, ReduceOp):
        raise InvalidUsage(f"{what}: op must be a comm_core.ReduceOp, got {op!r}")
    if kind in _ROOTED:
        check_rank(what, "root", operation.root, size)
    if operation.wide is not None and kind not in _ROUNDED:
        raise Unsupported(f"{what}: takes no wide tensors; cast before and after")
    if kind is Collective.BARRIER:
        return operation
    if kind is Collective.BROADCAST:
        flat = wire_form(what, "tensor", recv, device=device)
        return _in_wire_form(operation, flat, flat)
    if kind is Collective.REDUCE and rank != operation.root:
        return _in_wire_form(operation, wire_form(what, "send", send, op, device), NOTHING)
    if recv is NOTHING:
        raise InvalidUsage(f"{what}: rank {rank} needs a recv tensor, got None")
    source, target = wire_form(what, "send", send, op, device), wire_form(what, "recv", recv, op, device)
    if send.dtype is not recv.dtype:
        raise InvalidUsage(f"{what}: send has dtype {send.dtype} and recv has dtype {recv.dtype}")
    sends, recvs = operation.send_counts, operation.recv_counts
    factor = 2 if send.is_complex() else 1  # a complex number travels as two reals
    if kind is Collective.REDUCE_SCATTER:
        sends = _resolved(what, "counts", sends, send.numel(), size)
        recvs = [recv.numel()]
        _check_count(what, f"recv of rank {rank}", sends[rank], recv.numel())
        _check_disjoint(what, source, target)
    elif kind is Collective.ALL_GATHER:
        sends, recvs = [send.numel()], _resolved(what, "counts", recvs, recv.numel(), size)
        _check_count(what, f"send of rank {rank}", recvs[rank], send.numel())
        own = target[factor * sum(recvs[:rank]) :][: source.numel()]
        if overlap_in_memory(source, target) and not same_memory(source, own):
            raise InvalidUsage(f"{what}: send overlaps recv but is not rank {rank}'s own part of it")
    elif kind is Collective.ALL_TO_ALL:
        sends = _parts(what, "send_counts", sends, send.numel(), size)
        recvs = _parts(what, "recv_counts", recvs, recv.numel(), size)
        _check_count(what, f"what rank {rank} receives from itself", sends[rank], recvs[rank])
        _check_disjoint(what, source, target)
    else:
        _check_count(what, "recv", send.numel(), recv.numel())
        if not same_memory(source, target):
            _check_disjoint(what, source, target)
        return _in_wire_form(operation, source, target)
    made = _in_wire_form(operation, source, target, [n * factor for n in sends], [n * factor for n in recvs])
    if made.wide is not None:
        _check_wide(what, made, made.wide)
    return made


def _in_wire_form(
    one: Operation, send: torch.Tensor, recv: torch.Tensor, sends: Counts = None, recvs: Counts = None
) -> Operation:
    return Operation(one.kind, send, recv, one.op, one.root, sends, recvs, one.wide, one.label)


def _check_wide(what: str, operation: Operation, wide: Wide) -> None:
    """Check the fp32 tensors beside 16-bit ones; see `overlap.transport.operation.Wide`."""
    narrow = (("send", operation.send), ("recv", operation.recv))
    broad = (("wide send", wide.send), ("wide recv", wide.recv))
    for (name, one), (wide_name, other) in zip(narrow, broad, strict=True):
        if not is_half(one.dtype) or other.dtype is not torch.float32:
            raise InvalidUsage(
                f"{what}: {wide_name} is {other.dtype} and {name} is {one.dtype}; torch.float32 stands beside "
                "torch.float16 or torch.bfloat16"
            )
        wire_form(what, wide_name, other)
        _check_count(what, wide_name, one.numel(), other.numel())
    for (wide_name, other), (name, one) in (*product(broad, narrow), broad):
        if overlap_in_memory(other, one):
            raise InvalidUsage(f"{what}: {wide_name} shares memory with {name}")


def balanced_split(count: int, parts: int) -> list[int]:
    """`count` elements in `parts` shards as even as possible; the first `count % parts` get one element more."""
    base, more = divmod(count, parts)
    return [base + 1] * more + [base] * (parts - more)


def wire_form(
    what: str, name: str, tensor: torch.Tensor, op: ReduceOp | None = None, device: str = "cpu"
) -> torch.Tensor:
    """A flat view of `tensor`'s memory in a dtype comm_core knows; `op` is None where bytes are only moved.

    Refuses what has no plain, contiguous memory on a `device` of that type.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidUsage(f"{what}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise InvalidUsage(f"{what}: {name} must be a dense tensor, got layout {tensor.layout}")
    if tensor.device.type != device:
        raise Unsupported(f"{what}: {name} is on {tensor.device}, this communicator moves {device.upper()} tensors")
    if not tensor.is_contiguous():
        raise InvalidUsage(
            f"{what}: {name} must be contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}; "
            "pass .contiguous() or a flat view"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidUsage(f"{what}: {name} is a lazily conjugated or negated view; pass .resolve_conj().resolve_neg()")
    flat = tensor.data if tensor.dim() == 1 else tensor.data.reshape(-1)  # buckets are flat: a view less for each
    if flat.dtype in DTYPES:
        return flat
    if flat.is_complex():
        if op is not None and op not in _COMPLEX_OPS:
            raise Unsupported(f"{what}: {op.name} is not defined for {tensor.dtype}")
        return wire_form(what, name, torch.view_as_real(flat).reshape(-1), op, device)
    if op is None and flat.element_size() in _SAME_WIDTH:
        return flat.view(_SAME_WIDTH[flat.element_size()])
    raise Unsupported(
        f"{what}: {name} has dtype {tensor.dtype}, which cannot be {'moved' if op is None else 'reduced'}"
    )


def check_average(what: str, op: ReduceOp, tensor: torch.Tensor) -> None:
    """Refuse averages of whole numbers and booleans, as comm_core does."""
    if op is ReduceOp.AVG and not (tensor.is_floating_point() or tensor.is_complex()):
        raise Unsupported(f"{what}: AVG of {tensor.dtype} is not defined; reduce with SUM and divide as you see fit")


def check_rank(what: str, name: str, rank: int, size: int) -> None:
    """Refuse a rank outside the group."""
    if not 0 <= rank < size:
        raise InvalidUsage(f"{what}: {name} {rank} is not a rank of a group of {size}")


def check_timeout(what: str, timeout: float | None) -> float | None:
    """The number of seconds to wait, checked; None: for ever.

    ValueError where `timeout` is negative or not a number.
    """
    if timeout is None:
        return None
    if not timeout >= 0:
        raise InvalidUsage(f"{what}: timeout is {timeout}; pass seconds, 0 or more, or None to wait for ever")
    return None if timeout > threading.TIMEOUT_MAX else float(timeout)


def _resolved(what: str, name: str, counts: Sequence[int] | None, total: int, size: int) -> list[int]:
    """The shard sizes an operation works with: the caller's, checked, or the balanced split of `total`."""
    if counts is None:
        return balanced_split(total, size)
    resolved = [int(count) for count in counts]
    if len(resolved) != size:
        raise InvalidUsage(f"{what}: {name} has {len(resolved)} entries for {size} ranks")
    if min(resolved) < 0:
        raise InvalidUsage(f"{what}: {name} has a negative entry: {resolved}")
    if sum(resolved) != total:
        raise InvalidUsage(f"{what}: {name} add up to {sum(resolved)} elements, the buffer has {total}")
    return resolved


def _parts(what: str, name: str, counts: Sequence[int] | None, total: int, size: int) -> list[int]:
    """As :func:`_resolved`, with equal parts where no counts are given."""
    if counts is None and total % size:
        buffer = name.removesuffix("_counts")
        raise InvalidUsage(f"{what}: {buffer} has {total} elements, which do not divide by {size} ranks; pass counts")
    return _resolved(what, name, counts, total, size)


def _check_count(what: str, name: str, expected: int, got: int) -> None:
    """Refuse a buffer whose size does not fit the other arguments."""
    if expected != got:
        raise InvalidUsage(f"{what}: {name} has {got} elements, expected {expected}")


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a contiguous tensor lies in memory, as the half-open range of addresses."""
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two contiguous tensors are exactly the same bytes."""
    return byte_range(first) == byte_range(second)


def overlap_in_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two contiguous tensors share a byte."""
    (start, end), (other_start, other_end) = byte_range(first), byte_range(second)
    return max(start, other_start) < min(end, other_end)


def _check_disjoint(what: str, send: torch.Tensor, recv: torch.Tensor) -> None:
    """Refuse a receive buffer inside the send buffer of an operation that is not in place."""
    if overlap_in_memory(send, recv):
        raise InvalidUsage(f"{what}: recv ({_place(recv, send)}) overlaps send ({_place(send, recv)})")


def _place(tensor: torch.Tensor, other: torch.Tensor) -> str:
    (start, end), base = byte_range(tensor), min(tensor.data_ptr(), other.data_ptr())
    return f"bytes {start - base} to {end - base}"
