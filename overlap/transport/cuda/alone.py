"""The carrier of a rank that is alone: copies on the stream of the computation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from comm_core import ReduceOp
from overlap.transport.communicator import Communicator, Work
from overlap.transport.cuda.work import StagedWork

__all__ = ["AloneCarrier"]


class AloneCarrier:
    """A `Carrier` for a `host` communicator of one rank. Results are there when an operation was issued.

    What the host's communicator is given is the empty operation of that kind, so that it is counted and recorded.
    """

    through_host = True

    def __init__(self, host: Communicator) -> None:
        assert host.size == 1, "more ranks exchange something"
        self._host = host

    def _copied(self, send: torch.Tensor, recv: torch.Tensor | None, label: str) -> Work:
        if recv is not None and recv.data_ptr() != send.data_ptr():
            recv.copy_(send)
        return StagedWork(self._host.barrier_async(label=label), lambda _stream: None, lambda: 0)

    def reduce_scatter(
        self, send: torch.Tensor, recv: torch.Tensor, counts: Sequence[int], op: ReduceOp, label: str
    ) -> Work:
        return self._copied(send, recv, label)

    def all_gather(self, send: torch.Tensor, recv: torch.Tensor, counts: Sequence[int], label: str) -> Work:
        return self._copied(send, recv, label)

    def all_reduce(self, send: torch.Tensor, recv: torch.Tensor, op: ReduceOp, label: str) -> Work:
        return self._copied(send, recv, label)

    def broadcast(self, tensor: torch.Tensor, root: int, label: str) -> Work:
        return self._copied(tensor, None, label)

    def reduce(self, send: torch.Tensor, recv: torch.Tensor | None, op: ReduceOp, root: int, label: str) -> Work:
        return self._copied(send, recv, label)

    def all_to_all(
        self,
        send: torch.Tensor,
        recv: torch.Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        label: str,
    ) -> Work:
        return self._copied(send, recv, label)

    def flush(self) -> None:
        """Do nothing: what the host is given is issued at once."""

    def pending(self) -> list[Work]:
        return []

    def abandon(self) -> None:
        """Do nothing: nothing is under way."""

    def close(self) -> None:
        """Do nothing: nothing is under way."""
