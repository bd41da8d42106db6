"""The communicator of a job that mpirun started, and of a process alone: tensors over comm_core.

The only place that takes a tensor's address. comm_core keeps the tensor alive, as the owner of its buffer, until the
operation is done.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

import comm_core
from comm_core import Buffer, DType, ReduceOp
from overlap.transport.communicator import Communicator, Start, Wide, Work
from overlap.transport.requests import (
    Exchange,
    all_gather_request,
    all_reduce_request,
    all_to_all_request,
    broadcast_request,
    check_wide,
    reduce_request,
    reduce_scatter_request,
)

_ABORT_SECONDS = 5.0

#: What comm_core calls torch's types.
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


class NativeCommunicator(Communicator):
    """A `comm_core.Communicator` that takes tensors."""

    def __init__(self, core: Any) -> None:
        self._core = core

    @property
    def core(self) -> Any:
        """The comm_core communicator below."""
        return self._core

    @property
    def rank(self) -> int:
        return int(self._core.rank)

    @property
    def size(self) -> int:
        return int(self._core.size)

    @property
    def backend(self) -> str:
        return str(self._core.backend)

    @property
    def name(self) -> str:
        return str(self._core.name)

    def reduce_scatter_init(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        counts: Sequence[int] | None = None,
        wide: Wide | None = None,
        label: str = "",
    ) -> Start:
        request = reduce_scatter_request(self.rank, self.size, send, recv, op, counts)
        source = _readable(request.send) if wide is None else _writable(request.send)
        rest = {"counts": request.send_counts, "label": label, **_beside("reduce_scatter", wide, request)}
        return self._persistent(self._core.reduce_scatter_init(source, _writable(request.recv), op, **rest))

    def all_gather_init(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        *,
        counts: Sequence[int] | None = None,
        wide: Wide | None = None,
        label: str = "",
    ) -> Start:
        request = all_gather_request(self.rank, self.size, send, recv, counts)
        source = _readable(request.send) if wide is None else _writable(request.send)
        rest = {"counts": request.recv_counts, "label": label, **_beside("all_gather", wide, request)}
        return self._persistent(self._core.all_gather_init(source, _writable(request.recv), **rest))

    def all_reduce_init(
        self, send: torch.Tensor, recv: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, label: str = ""
    ) -> Start:
        request = all_reduce_request(send, recv, op)
        source, target = _readable(request.send), _writable(request.recv)
        return self._persistent(self._core.all_reduce_init(source, target, op, label=label))

    def _persistent(self, operation: comm_core.Persistent) -> Start:
        start = operation.start
        return lambda: self._issued(start())

    def broadcast_async(self, tensor: torch.Tensor, root: int = 0, *, label: str = "") -> Work:
        return self._issued(
            self._core.broadcast_async(_writable(broadcast_request(self.size, tensor, root)), root, label=label)
        )

    def reduce_async(
        self,
        send: torch.Tensor,
        recv: torch.Tensor | None,
        op: ReduceOp = ReduceOp.SUM,
        root: int = 0,
        *,
        label: str = "",
    ) -> Work:
        source, target = reduce_request(self.rank, self.size, send, recv, op, root)
        into = None if target is None else _writable(target)
        return self._issued(self._core.reduce_async(_readable(source), into, op, root, label=label))

    def all_to_all_async(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        label: str = "",
    ) -> Work:
        request = all_to_all_request(self.rank, self.size, send, recv, send_counts, recv_counts)
        return self._issued(
            self._core.all_to_all_async(
                _readable(request.send),
                _writable(request.recv),
                send_counts=request.send_counts,
                recv_counts=request.recv_counts,
                label=label,
            )
        )

    def barrier_async(self, *, label: str = "") -> Work:
        return self._issued(self._core.barrier_async(label=label))

    def split(self, color: int | None, key: int = 0) -> NativeCommunicator | None:
        self.issued += 1
        part = self._core.split(color, key)
        return None if part is None else NativeCommunicator(part)

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
    return comm_core.differ(_readable(rounded), _readable(exact))


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


def _beside(what: str, wide: Wide | None, request: Exchange) -> dict[str, Buffer]:
    if wide is None:
        return {}
    check_wide(what, wide.send, wide.recv, request.send, request.recv)
    return {"wide_send": _readable(wide.send), "wide_recv": _writable(wide.recv)}


def _readable(flat: torch.Tensor) -> Buffer:
    return Buffer(flat.data_ptr(), flat.numel(), DTYPES[flat.dtype], readonly=True, owner=flat)


def _writable(flat: torch.Tensor) -> Buffer:
    return Buffer(flat.data_ptr(), flat.numel(), DTYPES[flat.dtype], owner=flat)
