"""Requests: the arguments of each operation, checked and in wire form, for every `Communicator`.

`device` is the type of device whose memory the caller moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comm_core import InvalidUsage, ReduceOp
from overlap.transport.checks import (
    check_count,
    check_disjoint,
    check_disjoint_or_same,
    check_op,
    check_rank,
    check_same_dtype,
    equal_counts,
    overlap_in_memory,
    resolve_counts,
    same_memory,
    wire_form,
)


@dataclass(frozen=True)
class Exchange:
    """Two buffers and how each is divided among the ranks; counts are in elements of the wire dtype."""

    send: torch.Tensor
    recv: torch.Tensor
    send_counts: list[int]
    recv_counts: list[int]


def reduce_scatter_request(
    rank: int,
    size: int,
    send: torch.Tensor,
    recv: torch.Tensor,
    op: ReduceOp,
    counts: Sequence[int] | None,
    device: str = "cpu",
) -> Exchange:
    """Check a reduce-scatter: `send` is divided by counts, `recv` is one shard."""
    what = "reduce_scatter"
    check_op(what, op)
    shards = resolve_counts(what, "counts", counts, send.numel(), size)
    source, target = wire_form(what, "send", send, op, device), wire_form(what, "recv", recv, op, device)
    check_same_dtype(what, send, recv)
    check_count(what, f"recv of rank {rank}", shards[rank], recv.numel())
    check_disjoint(what, source, target)
    return Exchange(source, target, _widen(shards, send, source), [target.numel()])


def check_wide(
    what: str, wide_send: torch.Tensor, wide_recv: torch.Tensor, send: torch.Tensor, recv: torch.Tensor
) -> None:
    """Check the fp32 tensors beside 16-bit ones; see `overlap.transport.communicator.Wide`."""
    for name, wide, narrow in (("send", wide_send, send), ("recv", wide_recv, recv)):
        if narrow.dtype not in (torch.float16, torch.bfloat16) or wide.dtype is not torch.float32:
            raise InvalidUsage(
                f"{what}: wide {name} is {wide.dtype} and {name} is {narrow.dtype}; torch.float32 stands beside "
                "torch.float16 or torch.bfloat16"
            )
        wire_form(what, f"wide {name}", wide)
        check_count(what, f"wide {name}", narrow.numel(), wide.numel())
    apart = (("wide send", wide_send), ("wide recv", wide_recv)), (("send", send), ("recv", recv))
    for name, wide in apart[0]:
        for other, narrow in apart[1]:
            if overlap_in_memory(wide, narrow):
                raise InvalidUsage(f"{what}: {name} shares memory with {other}")
    if overlap_in_memory(wide_send, wide_recv):
        raise InvalidUsage(f"{what}: wide send shares memory with wide recv")


def all_gather_request(
    rank: int,
    size: int,
    send: torch.Tensor,
    recv: torch.Tensor,
    counts: Sequence[int] | None,
    device: str = "cpu",
) -> Exchange:
    """Check an all-gather: `recv` is divided by counts, `send` is apart from it or exactly its own part of it."""
    what = "all_gather"
    shards = resolve_counts(what, "counts", counts, recv.numel(), size)
    source, target = wire_form(what, "send", send, device=device), wire_form(what, "recv", recv, device=device)
    check_same_dtype(what, send, recv)
    check_count(what, f"send of rank {rank}", shards[rank], send.numel())
    wide = _widen(shards, recv, target)
    start = sum(wide[:rank])
    if overlap_in_memory(source, target) and not same_memory(source, target[start : start + wide[rank]]):
        raise InvalidUsage(f"{what}: send overlaps recv but is not rank {rank}'s own part of it")
    return Exchange(source, target, [source.numel()], wide)


def all_reduce_request(
    send: torch.Tensor, recv: torch.Tensor, op: ReduceOp, what: str = "all_reduce", device: str = "cpu"
) -> Exchange:
    """Check an all-reduce: two buffers of the same size, apart or the same."""
    check_op(what, op)
    source, target = wire_form(what, "send", send, op, device), wire_form(what, "recv", recv, op, device)
    check_same_dtype(what, send, recv)
    check_count(what, "recv", send.numel(), recv.numel())
    check_disjoint_or_same(what, source, target)
    return Exchange(source, target, [source.numel()], [target.numel()])


def reduce_request(
    rank: int,
    size: int,
    send: torch.Tensor,
    recv: torch.Tensor | None,
    op: ReduceOp,
    root: int,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Check a reduce: as an all-reduce at the root; elsewhere `recv` is not looked at."""
    what = "reduce"
    check_op(what, op)
    check_rank(what, "root", root, size)
    if rank != root:
        return wire_form(what, "send", send, op, device), None
    if recv is None:
        raise InvalidUsage(f"{what}: rank {rank} is the root and needs a recv tensor, got None")
    request = all_reduce_request(send, recv, op, what, device)
    return request.send, request.recv


def all_to_all_request(
    rank: int,
    size: int,
    send: torch.Tensor,
    recv: torch.Tensor,
    send_counts: Sequence[int] | None,
    recv_counts: Sequence[int] | None,
    device: str = "cpu",
) -> Exchange:
    """Check an all-to-all: both buffers are divided among all ranks."""
    what = "all_to_all"
    source, target = wire_form(what, "send", send, device=device), wire_form(what, "recv", recv, device=device)
    check_same_dtype(what, send, recv)
    sends = _parts(what, "send_counts", send_counts, send.numel(), size)
    recvs = _parts(what, "recv_counts", recv_counts, recv.numel(), size)
    check_count(what, f"what rank {rank} receives from itself", sends[rank], recvs[rank])
    check_disjoint(what, source, target)
    return Exchange(source, target, _widen(sends, send, source), _widen(recvs, recv, target))


def broadcast_request(size: int, tensor: torch.Tensor, root: int, device: str = "cpu") -> torch.Tensor:
    """Check a broadcast: the buffer to send or overwrite."""
    check_rank("broadcast", "root", root, size)
    return wire_form("broadcast", "tensor", tensor, device=device)


def _parts(what: str, name: str, counts: Sequence[int] | None, total: int, size: int) -> list[int]:
    if counts is None:
        return equal_counts(what, name.removesuffix("_counts"), total, size)
    return resolve_counts(what, name, counts, total, size)


def _widen(counts: list[int], tensor: torch.Tensor, wire: torch.Tensor) -> list[int]:
    """Counts of the caller's elements as counts of wire elements: a complex number travels as two reals."""
    factor = 2 if tensor.is_complex() and not wire.is_complex() else 1
    return [count * factor for count in counts]
