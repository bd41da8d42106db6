"""Keeps the buffers of a module, such as batch norm statistics, the same on all ranks after every step.

Training changes them from what a rank has seen, so without this every rank would evaluate, and save, another model. As
under DDP, each ``step()`` gives all ranks the buffers of the first one that trained: rank 0's, unless it has joined. They
travel while ``step()`` waits for the last gradients and updates. Buffers that no rank ever changes do not travel.

Which ones change is learned: a rank that finds a change in a module whose buffers do not travel yet says so in the call
that closes the round, and all agree on what they send from then on. torch counts the changes of a tensor, but not those
that its own batch norm, or a script through ``.data``, makes: in the first rounds, and then at doubling distances, the
contents are looked at, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.parameter import is_lazy

from overlap.core.feature import Feature
from overlap.transport.broadcast import is_plain, overwrite
from overlap.transport.communicator import Communicator, Work
from overlap.transport.objects import allgather_object
from overlap.transport.operation import broadcast
from overlap.transport.work import arrive

__all__ = ["BroadcastBuffers", "contents_of"]

log = logging.getLogger("dear")

_ALIGNMENT = 16  # bytes; the largest element, a complex double

_Spec = tuple[tuple[int, ...], torch.dtype, str]  # shape, dtype, type of device
_Dictionary = dict[str, "torch.Tensor | None"]
_Mark = list[tuple[int, int, str]]  # of each buffer: where it lies, how often it was changed there, its contents
_LOOKS = 3  # first rounds in which contents are looked at


@dataclass(frozen=True, slots=True)
class _Parcel:
    """What travels on one communicator: the named buffers one after the other in `packed`, of which `views` are parts."""

    comm: Communicator
    names: tuple[str, ...]
    packed: torch.Tensor
    views: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A parcel, and the buffers that it is for, each with how often it had been changed."""

    work: Work
    parcel: _Parcel
    targets: list[tuple[torch.Tensor, int]]


class BroadcastBuffers(Feature):
    """All ranks take the buffers of `model` from the first rank that contributes to a round.

    Args:
        model: its buffers are looked at in every call that closes a round.
        calls: carries buffers on the CPU; its operations follow the script's calls.
        reductions: carries buffers on a GPU, behind the gradients.
    """

    def __init__(self, model: torch.nn.Module, calls: Communicator, reductions: Communicator) -> None:
        self._model, self._calls, self._reductions = model, calls, reductions
        self._modules: list[torch.nn.Module] = []
        self._children: list[int] = []
        self._dictionaries: list[tuple[str, _Dictionary]] = []
        self._parcels: list[_Parcel] = []
        self._agreed: dict[str, _Spec] = {}  # these travel
        self._apart: set[str] = set()  # these cannot, as they differ between ranks
        self._closed = 0  # calls that closed a round
        self._marks: dict[str, _Mark] = {}
        self._mine: dict[str, torch.Tensor] = {}  # as they were when the round was closed …
        self._news: set[str] = set()  # … and those of which others do not know
        self._under_way: list[_UnderWay] = []
        self._root = 0
        self._find()
        self._mark()

    # - This rank's buffers

    def _find(self) -> None:
        """Going through all of a large model takes longer than its buffers do: only where modules came or went."""
        children = [id(child) for module in self._modules for child in module._modules.values()]
        if self._modules and children == self._children:
            return
        named = list(self._model.named_modules())
        self._modules = [module for _, module in named]
        self._children = [id(child) for module in self._modules for child in module._modules.values()]
        self._dictionaries = [(f"{name}." if name else "", module._buffers) for name, module in named]

    def _mark(self) -> None:
        self._marks = {prefix: _marked(buffers) for prefix, buffers in self._dictionaries if buffers}

    def alike(self) -> list[torch.Tensor]:
        """The buffers that all ranks have alike once a step is over. On this rank."""
        self._find()
        named = [(prefix, _plain(buffers)) for prefix, buffers in self._dictionaries if buffers]
        return [buffer for prefix, those in named for name, buffer in those if prefix + name not in self._apart]

    def news(self) -> bool:
        self._find()
        self._mine = {
            prefix + name: buffer
            for prefix, buffers in self._dictionaries
            if buffers
            for name, buffer in _plain(buffers)
        }
        self._news = self._changed(deep=bool(self._news) or looks_at_contents(self._closed))  # nobody has heard yet
        self._closed += 1
        return bool(self._news)

    def _changed(self, *, deep: bool) -> set[str]:
        """Those that have to travel from now on, or in another way, or not any more, by what this rank knows.

        `deep`: by their contents, too.
        """
        mine = self._mine
        found = {name for name, spec in self._agreed.items() if name not in mine or _spec(mine[name]) != spec}
        for prefix, buffers in self._dictionaries:
            if not buffers:
                continue
            open = {prefix + name for name, _ in _plain(buffers)}.difference(self._agreed, self._apart)
            if open and _differs(buffers, self._marks.get(prefix), deep=deep):
                found |= open
        return found

    # - What all ranks do

    def closed(self, news: bool, leader: Callable[[], int], factor: Callable[[], float]) -> None:
        if news:
            self._agree()
        if not self._parcels:
            return
        self._root = leader()
        for parcel in self._parcels:
            tensors = [self._mine[name].detach() for name in parcel.names]
            if parcel.comm.rank == self._root:
                _copy(parcel.views, tensors)
            work = parcel.comm.start(broadcast(parcel.packed, self._root, label="buffers"))
            self._under_way.append(_UnderWay(work, parcel, [(tensor, _version(tensor)) for tensor in tensors]))

    def ended(self) -> None:
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            arrive(each.work)
            if each.parcel.comm.rank != self._root:
                # What was changed since the round was closed stays this rank's until the next one. Written through .data,
                # of which no version tells: a graph that is kept stays valid.
                pairs = zip(each.targets, each.parcel.views, strict=True)
                chosen = [(tensor, view) for (tensor, version), view in pairs if _version(tensor) == version]
                _copy([tensor.data for tensor, _ in chosen], [view for _, view in chosen])

    def _agree(self) -> None:
        """Which buffers travel from now on. On every rank."""
        specs = {name: _spec(buffer) for name, buffer in self._mine.items()}
        told = allgather_object(self._calls, (self._news | set(self._agreed), specs))
        wanted = set().union(*(names for names, _ in told)) - self._apart
        alike = {name for name in wanted if all(theirs.get(name) == specs.get(name) for _, theirs in told)}
        apart = sorted(wanted - alike)
        if apart and self._calls.rank == 0:
            log.warning(
                "%d buffer(s), such as %r, differ between ranks in shape, type or device: each rank keeps its own of these "
                "from now on",
                len(apart),
                apart[0],
            )
        self._apart |= set(apart)
        self._agreed = {name: specs[name] for name in sorted(alike.intersection(specs))}
        self._mark()
        self._news = set()
        self._parcels = self._packed()

    def _packed(self) -> list[_Parcel]:
        by_device: dict[torch.device, list[str]] = {}
        for name in self._agreed:
            by_device.setdefault(self._mine[name].device, []).append(name)
        parcels = []
        for device, names in sorted(by_device.items(), key=lambda item: str(item[0])):
            sizes = [self._mine[name].numel() * self._mine[name].element_size() for name in names]
            ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
            packed = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
            views = [
                packed[start : start + size].view(self._mine[name].dtype).view(self._mine[name].shape)
                for name, start, size in zip(names, [0, *ends], sizes, strict=False)
            ]
            comm = self._calls if device.type == "cpu" else self._reductions
            parcels.append(_Parcel(comm, tuple(names), packed, views))
        return parcels


@torch.no_grad()
def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    pairs = list(zip(targets, sources, strict=True))
    plain = [pair for pair in pairs if 0 not in pair[0].stride()]
    if plain:
        torch._foreach_copy_([target for target, _ in plain], [source for _, source in plain])
    if len(plain) < len(pairs):  # expanded ones
        for target, source in pairs:
            if 0 in target.stride():
                overwrite(target, source)


def _plain(buffers: _Dictionary) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, buffer)
        for name, buffer in buffers.items()
        if buffer is not None and not is_lazy(buffer) and is_plain(buffer) and buffer.device.type != "meta"
    ]


def _spec(buffer: torch.Tensor) -> _Spec:
    return tuple(buffer.shape), buffer.dtype, buffer.device.type


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def looks_at_contents(closed: int) -> bool:
    """Whether contents are compared after so many calls that closed a round: at first always, then ever more seldom."""
    return closed < _LOOKS or closed & (closed - 1) == 0


def _marked(buffers: _Dictionary) -> _Mark:
    return [(each.data_ptr(), _version(each), contents_of(each)) for _, each in _plain(buffers)]


def _differs(buffers: _Dictionary, marks: _Mark | None, *, deep: bool) -> bool:
    """From what was marked; `deep`: in contents, too."""
    now = [(each.data_ptr(), _version(each)) for _, each in _plain(buffers)]
    if marks is None or now != [mark[:2] for mark in marks]:
        return True
    return deep and any(contents_of(each) != mark[2] for (_, each), mark in zip(_plain(buffers), marks, strict=True))


def contents_of(buffer: torch.Tensor) -> str:
    """A sum over the buffer's elements as text, taken in one pass, to tell whether they changed."""
    values = buffer.detach().resolve_conj().resolve_neg()
    values = torch.view_as_real(values) if values.is_complex() else values
    try:
        return str(float(values.sum(dtype=torch.float64)))  # a NaN is what it was
    except (RuntimeError, TypeError):  # types of 8 bits and fewer, which torch does not add up
        return str(float(values.contiguous().view(torch.uint8).sum(dtype=torch.float64)))
