"""``Mesh``: the job's ranks along named axes, each of which gives a process set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from overlap.horovod.controller.enqueue import runtime
from overlap.horovod.job import add_process_set
from overlap.job.mesh import Layout, laid_out
from overlap.job.process_set import ProcessSet
from overlap.job.session import current
from overlap.transport.objects import allgather_object, compare

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Mesh", "set_of"]


@dataclass(frozen=True, init=False, repr=False)
class Mesh:
    """Named axes over the ranks of the job, in row-major order: the last axis varies fastest.

        mesh = dear.Mesh(data=2, tensor=2)                       # tensor: ranks 0 1 and 2 3; data: 0 2 and 1 3
        dear.DistributedOptimizer(optimizer, model, process_set=mesh.group("data"))

    Their sizes are keyword arguments, whose product is the number of ranks. One may be -1: the rest. On every rank of the
    job, with the same axes: raises ``SignatureMismatch`` on all of them where they differ, and ``ValueError`` for axes that
    are none, or not all ranks.

    ``mesh["data"]`` has that axis alone, ``mesh["data", "tensor"]`` these two: of each rank, those that differ from it
    along them. A mesh is a value: hashable, and equal to another one with the same axes.
    """

    _layout: Layout
    _chosen: tuple[str, ...]

    def __init__(self, /, **axes: int) -> None:
        session = current()
        asked = [f"{name}={size!r}" for name, size in axes.items()]
        compare("axes of Mesh()", allgather_object(session.control, asked))
        layout = laid_out(axes, session.comm.size)
        object.__setattr__(self, "_layout", layout)
        object.__setattr__(self, "_chosen", tuple(layout.shape))

    def __getitem__(self, axes: str | tuple[str, ...]) -> Mesh:
        chosen = (axes,) if isinstance(axes, str) else tuple(axes)
        self._check(chosen)
        part: Mesh = object.__new__(Mesh)
        object.__setattr__(part, "_layout", self._layout)
        object.__setattr__(part, "_chosen", tuple(name for name in self._chosen if name in chosen))
        return part

    @property
    def axes(self) -> tuple[str, ...]:
        """The names, in order."""
        return self._chosen

    @property
    def shape(self) -> Mapping[str, int]:
        """The number of ranks along each axis."""
        whole = self._layout.shape
        return MappingProxyType({name: whole[name] for name in self._chosen})

    @property
    def coordinate(self) -> Mapping[str, int]:
        """The place of this rank along each axis, from 0. Raises ``ValueError`` in a job of another size."""
        whole = self._layout.coordinate(self._me())
        return MappingProxyType({name: whole[name] for name in self._chosen})

    def size(self, *axes: str) -> int:
        """The number of ranks along these axes together; without any, along all."""
        return prod(self.shape[name] for name in self._along(axes))

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """The ranks along these axes that include this one, in ascending order; without any, along all axes.

        Raises ``ValueError`` in a job of another size.
        """
        return self._layout.along(self._along(axes), self._me())

    def parts(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The ranks of this mesh that include this one, divided: those of each part differ along these axes alone."""
        return tuple(dict.fromkeys(self._layout.along(self._along(axes), rank) for rank in self.ranks()))

    def group(self, *axes: str) -> ProcessSet:
        """The process set of :meth:`ranks`. On every rank of the job, with the same axes.

        The first call registers the sets of all ranks; later ones, of this mesh or of another one with such ranks, return
        what is registered.
        """
        along = self._along(axes)
        self._me()
        return set_of(self._layout.groups(along))

    def device_mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """Make torch's ``DeviceMesh`` with these axes, over torch.distributed's default group. On every rank of the job.

        Each call makes process groups of torch. Raises ``RuntimeError`` where there is no default group, or one of other
        ranks: ``dear.init()`` makes it under ``mpirun``, and torchrun's jobs have it.
        """
        me, size = self._me(), self._layout_size
        there = torch.distributed.is_available() and torch.distributed.is_initialized()
        found = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if there else None
        if found != (me, size):
            has = "there is none" if found is None else f"it has rank {found[0]} of {found[1]} here"
            raise RuntimeError(
                f"device_mesh() is made over torch.distributed's default group, as rank {me} of {size}, and {has}: let "
                "init() make it, or call torch.distributed.init_process_group() on every rank"
            )
        from torch.distributed.device_mesh import init_device_mesh

        names = tuple(self._layout.shape)
        whole = init_device_mesh(device_type, tuple(self._layout.shape.values()), mesh_dim_names=names)
        return whole if self._chosen == names else whole[self._chosen]

    def __repr__(self) -> str:
        whole = ", ".join(f"{name}={size}" for name, size in self._layout.axes)
        part = "" if self._chosen == tuple(self._layout.shape) else f"[{', '.join(map(repr, self._chosen))}]"
        return f"Mesh({whole}){part}"

    @property
    def _layout_size(self) -> int:
        return prod(self._layout.shape.values())

    def _along(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        self._check(axes)
        return tuple(dict.fromkeys(axes)) or self._chosen

    def _check(self, axes: tuple[str, ...]) -> None:
        Layout(tuple(self.shape.items())).check(axes)

    def _me(self) -> int:
        comm = current().comm
        if comm.size != self._layout_size:
            raise ValueError(f"{self} has {self._layout_size} ranks, and the job has {comm.size}: make a mesh of it")
        return comm.rank


def set_of(groups: Iterable[tuple[int, ...]]) -> ProcessSet:
    """The process set among `groups` that this rank is in; they are registered where they are not yet.

    On every rank of the job, with the same groups in the same order, which have each rank once.
    """
    found = runtime()
    sets: list[Any] = [found.registered(ranks) or add_process_set(ranks) for ranks in groups]
    return next(each for each in sets if each.included())
