"""Axes of a mesh along which a model itself is divided, and which parameters are."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from overlap.job.devices import fit_out
from overlap.job.groups import Membership
from overlap.job.process_set import ProcessSet
from overlap.job.session import Session, current
from overlap.transport.communicator import Communicator

__all__ = ["Axis", "Part", "axes_of", "axis_of", "part_of", "set_part"]


class _Mesh(Protocol):
    @property
    def axes(self) -> tuple[str, ...]: ...
    def group(self, *axes: str) -> ProcessSet: ...
    def __hash__(self) -> int: ...


class Axis:
    """The ranks along an axis of a mesh that this rank is among, and their communicator."""

    def __init__(self, name: str, number: int, ranks: tuple[int, ...], comm: Communicator, session: Session) -> None:
        self.name, self.number, self.ranks, self.comm = name, number, ranks, comm
        self._session = weakref.ref(session)
        self._carried: Communicator | None = None

    @property
    def rank(self) -> int:
        """This rank's place along the axis."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """The number of ranks along it."""
        return self.comm.size

    def on(self, tensor: torch.Tensor) -> Communicator:
        """The communicator for tensors where this one lies. On every rank of the axis, in the same order."""
        if not tensor.is_cuda:
            return self.comm
        if self._carried is None:
            session = self._session()
            assert session is not None, "the job is over"
            one = (self.comm,)
            members = fit_out(session, Membership(one, one, self.comm, self.ranks, self.comm), [(self.name, tensor)])
            self._carried = members.comm
        return self._carried

    def __reduce__(self) -> Any:
        raise TypeError(f"the {self.name} axis of a running job cannot be pickled")

    def __deepcopy__(self, memo: Any) -> Axis:
        return self


_axes: weakref.WeakKeyDictionary[Session, dict[Any, Axis]] = weakref.WeakKeyDictionary()


def axis_of(mesh: _Mesh, name: str) -> Axis:
    """The axis `name` of `mesh`; the same object each time. On every rank of the job, the first time."""
    session = current()
    known = _axes.setdefault(session, {})
    if (mesh, name) not in known:
        group = mesh.group(name)
        assert group.ranks is not None, "a set that is registered has ranks"
        comm = session.subset(group.process_set_id)
        known[mesh, name] = Axis(name, mesh.axes.index(name), tuple(group.ranks), comm, session)
    return known[mesh, name]


@dataclass(frozen=True, eq=False)
class Part:
    """How a parameter is a part of one that ranks share: along each of these axes, other ranks have other values.

    Of a tensor that is divided along `dim`, `lengths` are those of all ranks along `axis`, in order; with a `stride`, each
    of so many blocks was divided for itself.
    """

    axis: Axis
    dim: int | None = None
    lengths: tuple[int, ...] = ()
    stride: int = 1


def set_part(parameter: torch.Tensor, part: Part) -> None:
    """Note that `parameter` is such a part, beside what it is along other axes."""
    parts = [each for each in part_of(parameter) if each.axis is not part.axis]
    parameter._dear_parts = (*parts, part)  # type: ignore[attr-defined]


def part_of(parameter: torch.Tensor) -> tuple[Part, ...]:
    """What was noted of `parameter`; nothing of one that all ranks have alike, but for data parallelism."""
    found: Sequence[Part] = getattr(parameter, "_dear_parts", ())
    return tuple(found)


def axes_of(parameters: Iterable[torch.Tensor]) -> tuple[Axis, ...]:
    """The axes along which any of `parameters` is a part, the last one of a mesh first."""
    found = {part.axis: None for parameter in parameters for part in part_of(parameter)}
    return tuple(sorted(found, key=lambda axis: -axis.number))
