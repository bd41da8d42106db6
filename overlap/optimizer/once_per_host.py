"""Frozen parameters, once in the memory of each host: its ranks map the same pages (`overlap.job.memory.pages`).

A rank that writes to one, as an optimizer does to what is not frozen any more, gets those pages for itself.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from overlap.core.buckets.heap import give_back
from overlap.features.replicas import digest_of
from overlap.job.axes import part_of
from overlap.job.memory.host_memory import host_memory
from overlap.job.memory.pages import host_pages, in_pages, storage_in
from overlap.job.session import Session
from overlap.state.deferred_init import check, is_deferred, move, storage_of, tensors_of
from overlap.transport.communicator import Communicator
from overlap.transport.objects import allgather_object
from overlap.transport.operation import barrier, broadcast

__all__ = [
    "Memory",
    "alike",
    "common",
    "frozen_memory",
    "host_of",
    "place_once",
    "share_again",
    "share_from_rank_0",
]

_ALIGNMENT = 64  # bytes, as memory of torch's own has


@dataclass(frozen=True, eq=False)
class Memory:
    """What frozen parameters, and nothing else of their model, lie in: one, or several that are tied by their memory."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return self.tensors[0].untyped_storage().nbytes()

    @property
    def line(self) -> str:
        """The same on ranks with the same parameters, and the same parts of them."""
        places = [(tuple(t.shape), tuple(t.stride()), t.storage_offset(), t.dtype) for t in self.tensors]
        parts = [[(part.axis.name, part.axis.rank) for part in part_of(t)] for t in self.tensors]
        return f"{self.names} in {self.nbytes} bytes: {places} {parts}"

    @property
    def mapped(self) -> bool:
        """Whether it is in pages that other processes may map, too."""
        return not is_deferred(self.tensors[0]) and in_pages(self.tensors[0])

    @property
    def digest(self) -> bytes:
        """Of the values, where they are mapped; else nothing."""
        return b"".join(digest_of(tensor) for tensor in self.tensors) if self.mapped else b""

    def read(self) -> torch.Tensor:
        """The bytes, of parameters that have no values yet in new memory."""
        return torch.empty(0, dtype=torch.uint8).set_(storage_of(self.tensors[0]))  # type: ignore[call-overload]

    def write(self, values: torch.Tensor) -> None:
        """Take over these bytes, in memory of this rank's own."""
        if is_deferred(self.tensors[0]):
            move(self.tensors, torch.UntypedStorage(self.nbytes, device="cpu"))
        self.read().copy_(values)


def frozen_memory(session: Session, model: torch.nn.Module, least: int = mmap.PAGESIZE) -> list[Memory]:
    """The memory of frozen parameters on the CPU that may be moved; of parameters without values, too. On any rank.

    Not what is shared with other processes already, is in an optimizer's bucket, or has less than `least` bytes and is not
    mapped. Raises ``RuntimeError`` as ``materialize()``.
    """
    slots = [slot for optimizer in session.registry.optimizers for slot in optimizer._engine.slots]
    stay = {id(slot.param) for slot in slots if slot.bucket is not None}
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors_of(model):
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
            found.setdefault(tensor.untyped_storage()._cdata, {})[name] = tensor
    memories = []
    for named in found.values():
        if all(_may_move(tensor) and id(tensor) not in stay for tensor in named.values()):
            for name, tensor in named.items():
                if is_deferred(tensor):
                    check(tensor, name)
            memories.append(Memory(tuple(named), tuple(named.values())))
    return [each for each in memories if each.nbytes >= least or each.mapped]


def _may_move(tensor: torch.Tensor) -> bool:
    on_cpu = is_deferred(tensor) or (tensor.device.type == "cpu" and not tensor.is_shared())
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad and on_cpu


def common(comm: Communicator, memories: Sequence[Memory], about: Sequence[object] | None = None) -> list[Memory]:
    """Those of `memories` that all ranks of `comm` have, and say the same `about`, in one order. On every one."""
    lines = [f"{each.line} {fact}" for each, fact in zip(memories, about or [None] * len(memories), strict=True)]
    told = allgather_object(comm, lines)
    mine = dict(zip(lines, memories, strict=True))
    return [mine[line] for line in told[0] if all(line in each for each in told)]


def alike(comm: Communicator, memories: Sequence[Memory]) -> tuple[list[Memory], list[Memory]]:
    """Those of `memories` that all ranks of `comm` have: which are to be placed, and which are where they may stay.

    The latter are in pages, of a file say, and have the same values on all ranks. On every one.
    """
    known = common(comm, memories)
    told = list(zip(*allgather_object(comm, [each.digest for each in known]), strict=True))
    stay = [len(set(digests)) == 1 and digests[0] != b"" for digests in told]
    pairs = list(zip(known, stay, strict=True))
    return [each for each, stays in pairs if not stays], [each for each, stays in pairs if stays]


def host_of(session: Session, ranks: Sequence[int]) -> Communicator:
    """Connects those of `ranks`, among which this one is, that are on its host. On every rank of the job."""
    if len(ranks) == session.comm.size:
        return host_memory(session).comm
    mine = [rank for rank in session.hosts[session.cross_rank] if rank in ranks]
    return session.subset(mine[0] if len(mine) > 1 else None)


def share_from_rank_0(comm: Communicator, host: Communicator, memories: Sequence[Memory]) -> None:
    """Give `memories` rank 0's values, once on each host. On every rank of `comm`, of which `host` has this host's."""

    def fill(memory: Memory, values: torch.Tensor) -> None:
        if comm.rank == 0:
            values[: memory.nbytes].copy_(memory.read())
        comm.run(broadcast(values.view(torch.int64), 0, label=f"values of {memory.names[0]}"))

    place_once(host, memories, fill)


def share_again(session: Session, model: torch.nn.Module) -> None:
    """Place frozen parameters of `model` once more that ranks of this host shared, and have all written to, alike.

    On every rank of the job.
    """
    host = host_memory(session).comm
    memories = common(host, [each for each in frozen_memory(session, model) if each.mapped])

    def fill(memory: Memory, values: torch.Tensor) -> None:
        if host.rank == 0:
            values[: memory.nbytes].copy_(memory.read())

    if host.size > 1:
        place_once(host, memories, fill)


def place_once(host: Communicator, memories: Sequence[Memory], fill: Callable[[Memory, torch.Tensor], None]) -> None:
    """Place `memories` in pages that the ranks of `host` share, one after the other; where there are none, in own ones.

    `fill(memory, values)` writes to `values`, uint8 and up to 63 bytes longer: on the first rank of `host` they become the
    memory, and on others where there are no pages. On every rank of `host`.
    """
    starts, total = [], 0
    for each in memories:
        starts.append(total)
        total += _padded(each.nbytes)
    found = host_pages(host, total) if memories else None
    scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
    if found is None or found.origin is None:
        scratch = scratch.new_empty(max((_padded(each.nbytes) for each in memories), default=0))
    for each, start in zip(memories, starts, strict=True):
        size = _padded(each.nbytes)
        values = scratch[:size] if found is None or found.origin is None else found.origin[start : start + size]
        fill(each, values)
        if found is None:
            each.write(values[: each.nbytes])
        else:
            move(each.tensors, storage_in(found.pages, start, each.nbytes))
    if found is not None:
        host.run(barrier(label="frozen parameters"))  # then others may read
        give_back()


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
