"""Buffers of a module, such as the statistics of a batch norm: the same on all ranks after every step.

Training changes them from what a rank has seen, so without this every rank would evaluate, and save, another model. As
under DDP, each ``step()`` gives all ranks the buffers of the first one that trained: rank 0's, unless it has joined. They
travel while ``step()`` waits for the last gradients and updates. Buffers that no rank ever changes do not travel.

Which ones change is learned: a rank that finds a change in a module whose buffers do not travel yet says so in the call
that closes the round, and all agree on what they send from then on. torch counts the changes of a tensor, but not those
that its own batch norm, or a script through ``.data``, makes: in the first rounds the contents are looked at, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from overlap.core.bucket import Bucket
from overlap.core.feature import Feature
from overlap.transport.broadcast import is_plain, overwrite
from overlap.transport.communicator import Communicator, Work
from overlap.transport.objects import allgather_object

__all__ = ["BroadcastBuffers"]

log = logging.getLogger("dear")

_ALIGNMENT = 16  # bytes; the largest element, a complex double

_Spec = tuple[tuple[int, ...], torch.dtype, str]  # shape, dtype, type of device
_Dictionary = dict[str, "torch.Tensor | None"]
_Mark = list[tuple[int, int, str]]  # of each buffer: where it lies, how often it was changed there, its contents
_LOOKS = 3  # rounds in which contents are looked at


@dataclass(frozen=True, slots=True)
class _Parcel:
    """What travels on one communicator: the named buffers one after the other in `packed`, of which `views` are parts."""

    comm: Communicator
    names: tuple[str, ...]
    packed: torch.Tensor
    views: list[torch.Tensor]


class BroadcastBuffers(Feature):
    """All ranks take the buffers of `model` from the first rank that contributes to a round.

    Args:
        model: its buffers are looked at in every call that closes a round.
        calls: carries buffers on the CPU; its operations follow the script's calls.
        reductions: carries buffers on a GPU, behind the gradients.
    """

    def __init__(self, model: torch.nn.Module, calls: Communicator, reductions: Communicator) -> None:
        self._model, self._calls, self._reductions = model, calls, reductions
        self._dictionaries: list[tuple[str, _Dictionary]] = []
        self._find()
        self._parcels: list[_Parcel] = []
        self._agreed: dict[str, _Spec] = {}  # these travel
        self._apart: dict[str, _Spec] = {}  # these cannot, as they differ between ranks
        self._looks = _LOOKS  # that are left
        self._marks: dict[str, _Mark] = {}
        self._news: set[str] = set()
        self._mark()
        self._under_way: list[tuple[Work, _Parcel]] = []
        self._root = 0

    def planned(self, order: Sequence[Bucket]) -> None:
        self._find()

    def _find(self) -> None:
        """Once for each plan: going through a large model in every step would take longer than its buffers do."""
        self._dictionaries = [(f"{name}." if name else "", m._buffers) for name, m in self._model.named_modules()]

    def _mark(self) -> None:
        self._marks = {prefix: _marked(buffers, self._looks > 0) for prefix, buffers in self._dictionaries if buffers}

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, buffers in self._dictionaries:
            if buffers:
                for name, buffer in _plain(buffers):
                    yield prefix + name, buffer

    def news(self) -> bool:
        self._news = self._changed(dict(self._buffers()))
        if self._looks:
            self._looks -= 1
            if not self._looks:
                self._mark()
        return bool(self._news)

    def _changed(self, mine: dict[str, torch.Tensor]) -> set[str]:
        """Those that have to travel from now on, or in another way, or not any more, by what this rank knows."""
        found = {name for name, spec in self._agreed.items() if name not in mine or _spec(mine[name]) != spec}
        for prefix, buffers in self._dictionaries:
            if not buffers:
                continue
            open = {prefix + name for name, buffer in _plain(buffers) if not self._settled(prefix + name, buffer)}
            if open and _marked(buffers, self._looks > 0) != self._marks.get(prefix):
                found |= open
        return found

    def _settled(self, name: str, buffer: torch.Tensor) -> bool:
        known = self._apart.get(name)
        return name in self._agreed or (known is not None and known == _spec(buffer))

    def closed(self, news: bool, leader: Callable[[], int], factor: Callable[[], float]) -> None:
        if not (news or self._parcels):
            return
        mine = dict(self._buffers())
        if news:
            self._agree(mine)
        self._root = leader()
        for parcel in self._parcels:
            if parcel.comm.rank == self._root:
                for name, view in zip(parcel.names, parcel.views, strict=True):
                    overwrite(view, mine[name].detach())
            work = parcel.comm.broadcast_async(parcel.packed, self._root, label="buffers")
            self._under_way.append((work, parcel))

    def ended(self) -> None:
        if not self._under_way:
            return
        under_way, self._under_way = self._under_way, []
        mine = dict(self._buffers())
        for work, parcel in under_way:
            work.wait()
            if parcel.comm.rank != self._root:
                for name, view in zip(parcel.names, parcel.views, strict=True):
                    overwrite(mine[name].data, view)  # of which no version tells: a graph that is kept stays valid

    def _agree(self, mine: dict[str, torch.Tensor]) -> None:
        """Which buffers travel from now on. On every rank."""
        specs = {name: _spec(buffer) for name, buffer in mine.items()}
        told = allgather_object(self._calls, (self._news | set(self._agreed), specs))
        wanted = set().union(*(names for names, _ in told))
        alike = {name for name in wanted if all(theirs.get(name) == specs.get(name) for _, theirs in told)}
        apart = sorted(wanted - alike - set(self._apart))
        if apart and self._calls.rank == 0:
            log.warning(
                "%d buffer(s), such as %r, differ between ranks in shape, type or device: each rank keeps its own of these "
                "(this is said once)",
                len(apart),
                apart[0],
            )
        self._apart = {name: specs[name] for name in (*self._apart, *apart) if name in specs and name not in alike}
        self._agreed = {name: specs[name] for name in sorted(alike.intersection(specs))}
        self._mark()
        self._parcels = self._packed(mine)

    def _packed(self, mine: dict[str, torch.Tensor]) -> list[_Parcel]:
        by_device: dict[torch.device, list[str]] = {}
        for name in self._agreed:
            by_device.setdefault(mine[name].device, []).append(name)
        parcels = []
        for device, names in sorted(by_device.items(), key=lambda item: str(item[0])):
            sizes = [mine[name].numel() * mine[name].element_size() for name in names]
            ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
            packed = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
            views = [
                packed[start : start + size].view(mine[name].dtype).view(mine[name].shape)
                for name, start, size in zip(names, [0, *ends], sizes, strict=False)
            ]
            comm = self._calls if device.type == "cpu" else self._reductions
            parcels.append(_Parcel(comm, tuple(names), packed, views))
        return parcels


def _spec(buffer: torch.Tensor) -> _Spec:
    return tuple(buffer.shape), buffer.dtype, buffer.device.type


def _plain(buffers: _Dictionary) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in buffers.items() if buffer is not None and is_plain(buffer)]


def _marked(buffers: _Dictionary, deep: bool) -> _Mark:
    """`deep`: their contents, too."""
    return [
        (b.data_ptr(), -1 if b.is_inference() else b._version, _contents(b) if deep else "") for _, b in _plain(buffers)
    ]


def _contents(buffer: torch.Tensor) -> str:
    values = torch.view_as_real(buffer.detach().resolve_conj()) if buffer.is_complex() else buffer.detach()
    return str(float(values.sum(dtype=torch.float64)))  # a NaN is what it was
