"""The communicator of a job that mpirun started, and of a process alone: tensors over comm_core.

The only place that takes a tensor's address. comm_core keeps the tensor alive, as the owner of its buffer, until the
operation is done.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import comm_core
from comm_core import Buffer
from overlap.transport.checks import DTYPES, checked, wire_form
from overlap.transport.communicator import Communicator, Start, Work
from overlap.transport.operation import NOTHING, REDUCTIONS, Collective, Operation

_ABORT_SECONDS = 5.0

#: Describes a flat tensor's memory to comm_core, which only reads it if so told.
MakeBuffer = Callable[[torch.Tensor, bool], Buffer]
# The kinds that comm_core can check once for many times.
_PERSISTENT = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.ALL_REDUCE)


class NativeCommunicator(Communicator):
    """A `comm_core.Communicator` that takes tensors."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.rank, self.size = int(core.rank), int(core.size)
        self.backend, self.name = str(core.backend), str(core.name)

    @property
    def shard_rank(self) -> int:
        return int(self._core.shard_rank)

    @property
    def shard_size(self) -> int:
        return int(self._core.shard_size)

    def prepare(self, operation: Operation) -> Start:
        one = checked(operation, *self.place_of(operation))
        memory, named = arguments(one, _buffer)
        start: Callable[[], Work]
        if one.kind in _PERSISTENT:
            start = getattr(self._core, f"{one.kind.value}_init")(*memory, **named).start
        else:
            start = partial(getattr(self._core, f"{one.kind.value}_async"), *memory, **named)
        return lambda: self._issued(start())

    def split(self, color: int | None, key: int = 0) -> NativeCommunicator | None:
        self.issued += 1
        part = self._core.split(color, key)
        return None if part is None else NativeCommunicator(part)

    def part(self, ranks: Sequence[int], name: str) -> NativeCommunicator:
        """A communicator of these `ranks`, in this order; no rank waits for another. On every one of them, and on no other.

        All give the same `name`, which no other part of this communicator has. Over TCP; else ``Unsupported``.
        """
        return NativeCommunicator(self._core.part(list(ranks), name))

    def two_level(self, groups: Sequence[Sequence[int]]) -> NativeCommunicator:
        self.issued += 1
        return NativeCommunicator(self._core.two_level(groups))

    def hybrid(self, groups: Sequence[Sequence[int]]) -> NativeCommunicator:
        self.issued += 1
        return NativeCommunicator(self._core.hybrid(groups))

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0, *, label: str = "") -> Work:
        """Send the contiguous `tensor` to `peer`, which receives it with the same `tag`, from 0 to 1023.

        Messages of one sender, receiver and tag keep their order. They hold up nothing else, and nothing holds them up.
        """
        return self._core.send_async(_buffer(wire_form("send", "tensor", tensor), True), peer, tag, label=label)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int = 0, *, label: str = "") -> Work:
        """Receive into the contiguous `tensor` what `peer` sends with this `tag`: see :meth:`send`."""
        return self._core.recv_async(_buffer(wire_form("recv", "tensor", tensor), False), peer, tag, label=label)

    def post(self, peer: int, payload: bytes) -> Work:
        return self._core.post(peer, payload)

    def receive_post(self, timeout: float | None) -> tuple[int, bytes] | None:
        return self._core.receive_post(timeout)

    def pending(self) -> list[Work]:
        return list(self._core.pending())

    def abort(self, code: int) -> None:
        # MPI_Abort waits for the daemon of this host, and that one for the job's first host, which may be out of reach.
        last = threading.Timer(_ABORT_SECONDS, os._exit, (code,))
        last.daemon = True
        last.start()
        comm_core.abort(code)

    def abandon(self) -> None:
        self._core.abandon()

    def close(self) -> None:
        self._core.close()


def differ(rounded: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether some element of `rounded`, fp16 or bf16, differs from that of `exact`, fp32. A NaN always is.

    Flat tensors of one size on the CPU.
    """
    return comm_core.differ(_buffer(rounded, True), _buffer(exact, True))


def copy_past_caches(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` to `target`. Autograd does not hear of it, nor `target`'s version.

    Tensors of one type, shape and strides on the CPU, without gaps between their elements.
    """
    comm_core.copy_past_caches(target.data_ptr(), source.data_ptr(), target.numel() * target.element_size())


def blockwise_bytes(numel: int, bits: int) -> int:
    """The number of bytes that :func:`encode_blockwise` makes of `numel` numbers, a multiple of 4."""
    return int(comm_core.blockwise_bytes(numel, bits))


def encode_blockwise(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Encode numbers as bytes: 8 or 4 bits each, and an fp32 scale for every 128.

    ``comm_core/blockwise.hpp`` has the layout.

    A flat fp32 or fp64 tensor on the CPU, without gaps; gives a flat one of uint8. No graph.
    """
    wire = torch.empty(blockwise_bytes(values.numel(), bits), dtype=torch.uint8, device="cpu")
    comm_core.encode_blockwise(wire.data_ptr(), values.data_ptr(), values.numel(), bits, DTYPES[values.dtype])
    return wire


def decode_blockwise(wire: torch.Tensor, values: torch.Tensor, bits: int) -> None:
    """Decode what :func:`encode_blockwise` made into `values`, of the size and type that were encoded."""
    comm_core.decode_blockwise(values.data_ptr(), wire.data_ptr(), values.numel(), bits, DTYPES[values.dtype])


def take_samples(kept: torch.Tensor, source: torch.Tensor, places: torch.Tensor) -> None:
    """Copy samples: ``kept[i] = source[places[i]]``, for flat tensors on the CPU, two of one type and int64."""
    addresses = kept.data_ptr(), source.data_ptr(), places.data_ptr()
    comm_core.take_samples(*addresses, places.numel(), source.element_size())


def changed_sample(kept: torch.Tensor, source: torch.Tensor, places: torch.Tensor) -> int | None:
    """The first i where ``source[places[i]]`` is not ``kept[i]`` bit for bit; see :func:`take_samples`."""
    addresses = kept.data_ptr(), source.data_ptr(), places.data_ptr()
    found = comm_core.changed_sample(*addresses, places.numel(), source.element_size())
    return None if found < 0 else found


def arguments(operation: Operation, buffer: MakeBuffer) -> tuple[list[Any], dict[str, Any]]:
    """What comm_core's method for a checked operation takes, by position and by name."""
    one, kind = operation, operation.kind
    memory: list[Any] = []
    named: dict[str, Any] = {"label": one.label}
    if kind is Collective.BROADCAST:
        memory += buffer(one.recv, False), one.root
    elif kind is not Collective.BARRIER:
        memory += buffer(one.send, one.wide is None), None if one.recv is NOTHING else buffer(one.recv, False)
    if kind in REDUCTIONS:
        memory.append(one.op)
    if kind is Collective.REDUCE:
        memory.append(one.root)
    if kind is Collective.REDUCE_SCATTER:
        named["counts"] = one.send_counts
    elif kind is Collective.ALL_GATHER:
        named["counts"] = one.recv_counts
    elif kind is Collective.ALL_TO_ALL:
        named |= {"send_counts": one.send_counts, "recv_counts": one.recv_counts}
    if one.wide is not None:
        named |= {"wide_send": buffer(one.wide.send, True), "wide_recv": buffer(one.wide.recv, False)}
    return memory, named


def _buffer(flat: torch.Tensor, readonly: bool) -> Buffer:
    return Buffer(flat.data_ptr(), flat.numel(), DTYPES[flat.dtype], readonly=readonly, owner=flat)
