"""A communicator for models on a device: its tensors take a carrier, all others the host's communicator.

    bucket on the device ─▶ carrier: NCCL | pinned memory and the host's transport | nothing, for a rank alone
    losses, flags, pickled objects, letters ─▶ host

Each of the two keeps the order in which it was given its operations, and they never meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from comm_core import ReduceOp, Unsupported
from overlap.transport.communicator import Communicator, Start, Wide, Work
from overlap.transport.cuda.route import refuse_capture
from overlap.transport.cuda.streams import Streams
from overlap.transport.requests import (
    all_gather_request,
    all_reduce_request,
    all_to_all_request,
    broadcast_request,
    reduce_request,
    reduce_scatter_request,
)
from overlap.transport.stamps import Stamps

__all__ = ["Carrier", "DeviceCommunicator"]

Counts = Sequence[int]


class Carrier(Protocol):
    """Moves flat tensors of one device, in a dtype that comm_core knows. Arguments were checked; counts are by rank."""

    #: Whether each operation is one of the host's communicator, which counts it and tells a timeline.
    through_host: bool

    def reduce_scatter(self, send: torch.Tensor, recv: torch.Tensor, counts: Counts, op: ReduceOp, label: str) -> Work:
        """Issue a reduce-scatter, as `overlap.transport.communicator.Communicator.reduce_scatter_async` does."""

    def all_gather(self, send: torch.Tensor, recv: torch.Tensor, counts: Counts, label: str) -> Work: ...
    def all_reduce(self, send: torch.Tensor, recv: torch.Tensor, op: ReduceOp, label: str) -> Work: ...
    def broadcast(self, tensor: torch.Tensor, root: int, label: str) -> Work: ...
    def reduce(self, send: torch.Tensor, recv: torch.Tensor | None, op: ReduceOp, root: int, label: str) -> Work: ...
    def all_to_all(
        self, send: torch.Tensor, recv: torch.Tensor, send_counts: Counts, recv_counts: Counts, label: str
    ) -> Work: ...
    def flush(self) -> None:
        """Have everything issued on the host's communicator that goes there, before something else is."""

    def pending(self) -> list[Work]:
        """The unfinished operations that the host's communicator does not know of."""

    def abandon(self) -> None:
        """End, with an error, unfinished operations that the host's communicator does not know of. On every rank."""

    def close(self) -> None:
        """Wait for what was issued. On every rank."""


class DeviceCommunicator(Communicator):
    """The communicator `host`, with a carrier for tensors of the streams' kind of device.

    Close the carrier, then `host`.
    """

    rounds = False

    def __init__(self, host: Communicator, carrier: Carrier, streams: Streams) -> None:
        self._host, self._carrier, self._streams = host, carrier, streams
        self.streams = streams
        self._kind = streams.kind
        self.place = torch.device(streams.kind, streams.device)

    def stamps(self) -> Stamps:
        return self._streams.stamps(on_streams=not self._carrier.through_host)

    def belongs(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` takes the carrier."""
        return tensor.device.type == self._kind

    @property
    def rank(self) -> int:
        return self._host.rank

    @property
    def size(self) -> int:
        return self._host.size

    @property
    def backend(self) -> str:
        return self._host.backend

    @property
    def name(self) -> str:
        return self._host.name

    def _on_host(self) -> Communicator:
        """For tensors of the host, behind all that the carrier has to issue there."""
        self._carrier.flush()
        return self._host

    def _ready(self, what: str) -> Carrier:
        reason = refuse_capture(self._streams.capturing())
        if reason is not None:
            raise Unsupported(f"{what}: {reason}")
        return self._carrier

    def _later(self, start: Start) -> Start:
        def issue() -> Work:
            self._carrier.flush()
            return start()

        return issue

    def _through(self, work: Work) -> Work:
        if self._carrier.through_host:
            return work
        self._host.issued += 1  # who leases the channel compares how many there were on each rank
        return self._issued(work)

    # - Collectives

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
        if not self.belongs(send):
            return self._later(self._host.reduce_scatter_init(send, recv, op, counts=counts, wide=wide, label=label))
        _refuse_wide("reduce_scatter", wide)
        made = reduce_scatter_request(self.rank, self.size, send, recv, op, counts, self._kind)
        return lambda: self._through(
            self._ready("reduce_scatter").reduce_scatter(made.send, made.recv, made.send_counts, op, label)
        )

    def all_gather_init(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        *,
        counts: Sequence[int] | None = None,
        wide: Wide | None = None,
        label: str = "",
    ) -> Start:
        if not self.belongs(recv):
            return self._later(self._host.all_gather_init(send, recv, counts=counts, wide=wide, label=label))
        _refuse_wide("all_gather", wide)
        made = all_gather_request(self.rank, self.size, send, recv, counts, self._kind)
        return lambda: self._through(
            self._ready("all_gather").all_gather(made.send, made.recv, made.recv_counts, label)
        )

    def all_reduce_init(
        self, send: torch.Tensor, recv: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, label: str = ""
    ) -> Start:
        if not self.belongs(send):
            return self._later(self._host.all_reduce_init(send, recv, op, label=label))
        made = all_reduce_request(send, recv, op, device=self._kind)
        return lambda: self._through(self._ready("all_reduce").all_reduce(made.send, made.recv, op, label))

    def broadcast_async(self, tensor: torch.Tensor, root: int = 0, *, label: str = "") -> Work:
        if not self.belongs(tensor):
            return self._on_host().broadcast_async(tensor, root, label=label)
        flat = broadcast_request(self.size, tensor, root, self._kind)
        return self._through(self._ready("broadcast").broadcast(flat, root, label))

    def reduce_async(
        self,
        send: torch.Tensor,
        recv: torch.Tensor | None,
        op: ReduceOp = ReduceOp.SUM,
        root: int = 0,
        *,
        label: str = "",
    ) -> Work:
        if not self.belongs(send):
            return self._on_host().reduce_async(send, recv, op, root, label=label)
        source, target = reduce_request(self.rank, self.size, send, recv, op, root, self._kind)
        return self._through(self._ready("reduce").reduce(source, target, op, root, label))

    def all_to_all_async(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        label: str = "",
    ) -> Work:
        if not self.belongs(send):
            return self._on_host().all_to_all_async(
                send, recv, send_counts=send_counts, recv_counts=recv_counts, label=label
            )
        made = all_to_all_request(self.rank, self.size, send, recv, send_counts, recv_counts, self._kind)
        carrier = self._ready("all_to_all")
        return self._through(carrier.all_to_all(made.send, made.recv, made.send_counts, made.recv_counts, label))

    # - The host's alone: a tensor of the device is refused there

    def barrier_async(self, *, label: str = "") -> Work:
        return self._on_host().barrier_async(label=label)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        raise Unsupported(
            "a communicator for the tensors of a device is not split; split the host's, and give it a carrier"
        )

    def post(self, peer: int, payload: bytes) -> Work:
        return self._host.post(peer, payload)

    def receive_post(self, timeout: float | None) -> tuple[int, bytes] | None:
        return self._host.receive_post(timeout)

    def pending(self) -> list[Work]:
        return [*self._host.pending(), *self._carrier.pending()]

    def abort(self, code: int) -> None:
        self._host.abort(code)

    def abandon(self) -> None:
        self._carrier.abandon()

    def close(self) -> None:
        self._carrier.close()


def _refuse_wide(what: str, wide: Wide | None) -> None:
    if wide is not None:
        raise Unsupported(f"{what}: a carrier of a device rounds nothing; cast on the device before and after")
