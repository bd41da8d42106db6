"""Operations that move tensors: all-gather, broadcast, all-to-all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap.horovod.controller.operation import Group, Operation
from overlap.horovod.controller.request import Response
from overlap.horovod.tensors import own_copy, plain, put_back
from overlap.transport.communicator import Work

__all__ = ["Allgather", "Alltoall", "Broadcast"]


class Allgather(Operation):
    """Every rank's rows, one rank after the other."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._buffers = [plain(tensor) for tensor in tensors]
        self._outputs: list[torch.Tensor] = []
        self.rows: tuple[tuple[int, ...], ...] = ()
        """How many rows came from each rank, for every tensor; known with the result."""

    def start(self, response: Response, group: Group) -> list[Work]:
        self.rows = response.rows
        works = []
        for buffer, rows in zip(self._buffers, response.rows, strict=True):
            output = buffer.new_empty((sum(rows), *buffer.shape[1:]))
            row_numel = buffer.shape[1:].numel()
            counts = [count * row_numel for count in rows]
            works.append(group.members.all_gather_async(buffer, output, counts=counts, label=response.request.name))
            self._outputs.append(output)
        return works

    def result(self) -> list[torch.Tensor]:
        return [output.to(tensor.device) for output, tensor in zip(self._outputs, self._tensors, strict=True)]


class Broadcast(Operation):
    """The root's tensors, in place of this rank's or as new ones."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, in_place: bool) -> None:
        self._tensors, self._in_place = list(tensors), in_place
        self._buffers = [plain(tensor) if in_place else own_copy(tensor) for tensor in tensors]
        self._is_root = False

    def start(self, response: Response, group: Group) -> list[Work]:
        root = group.ranks.index(response.request.root)
        self._is_root = root == group.index
        name = response.request.name
        return [group.members.broadcast_async(buffer, root, label=name) for buffer in self._buffers]

    def result(self) -> list[torch.Tensor]:
        if not self._in_place:
            pairs = zip(self._buffers, self._tensors, strict=True)
            return [buffer.to(tensor.device) for buffer, tensor in pairs]
        for buffer, tensor in zip(self._buffers, self._tensors, strict=True):
            if not self._is_root and buffer.data_ptr() != tensor.data_ptr():
                put_back(tensor, buffer)
        return self._tensors


class Alltoall(Operation):
    """Rows for every rank, and rows from every rank."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._buffer = tensor, plain(tensor)
        self._output = self._buffer
        self._received: list[int] = []

    def start(self, response: Response, group: Group) -> list[Work]:
        me = group.index
        row_numel = self._buffer.shape[1:].numel()
        self._received = [splits[me] for splits in response.splits]
        self._output = self._buffer.new_empty((sum(self._received), *self._buffer.shape[1:]))
        send_counts = [count * row_numel for count in response.splits[me]]
        recv_counts = [count * row_numel for count in self._received]
        work = group.members.all_to_all_async(
            self._buffer,
            self._output,
            send_counts=send_counts,
            recv_counts=recv_counts,
            label=response.request.name,
        )
        return [work]

    def result(self) -> tuple[torch.Tensor, list[int]]:
        """The rows, and how many of them came from each rank."""
        return self._output.to(self._tensor.device), self._received
