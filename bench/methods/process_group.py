"""Joins torch.distributed, for baselines that run over it, under torchrun or under mpirun on real or emulated hosts."""

from __future__ import annotations

import importlib
import os
import zlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bench.methods.method import Place
from overlap.job.launch import Launcher, detect

__all__ = ["BACKENDS", "grid", "group", "join", "leave", "mesh", "tell_as_torchrun"]

BACKENDS = ("gloo", "nccl", "dear")  # that a method may name

_made: list[dist.ProcessGroup] = []  # here, at most one
_beside: dict[str, dist.ProcessGroup] = {}  # groups of all ranks over other backends than the default group's


def tell_as_torchrun() -> None:
    """Have this process's environment tell of its rank as torchrun's does, for libraries that know no other.

    Between hosts mpirun's launcher exports MASTER_ADDR and MASTER_PORT.
    """
    launch = detect(os.environ)
    if launch.launcher is Launcher.TORCHRUN:
        return
    os.environ.update(RANK=str(launch.rank), WORLD_SIZE=str(launch.size))
    if launch.local_rank is not None and launch.local_size is not None:
        os.environ.update(LOCAL_RANK=str(launch.local_rank), LOCAL_WORLD_SIZE=str(launch.local_size))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(_port(os.environ.get("PMIX_NAMESPACE", ""))) if launch.size > 1 else "0")


def _port(job: str) -> int:
    """One for each job of an Open MPI, by its name, since jobs on one machine would meet each other.

    Linux hands out none of these by itself.
    """
    return 20000 + zlib.crc32(job.encode()) % 10000


def join(device: torch.device, backend: str | None = None) -> Place:
    """Make the default group, unless it is there, over that backend; None: gloo for the CPU, NCCL for CUDA."""
    if dist.is_initialized():
        return Place(dist.get_rank(), dist.get_world_size())
    tell_as_torchrun()
    dist.init_process_group(_known(device, backend))
    assert dist.group.WORLD is not None
    _made.append(dist.group.WORLD)
    return Place(dist.get_rank(), dist.get_world_size())


def group(device: torch.device, backend: str | None = None) -> dist.ProcessGroup:
    """All ranks, over that backend: the default group, or one beside it, so that two methods may differ. On every rank."""
    name = _known(device, backend)
    assert dist.group.WORLD is not None
    if dist.get_backend() == name:
        return dist.group.WORLD
    if name not in _beside:
        _beside[name] = dist.new_group(backend=name)
    return _beside[name]


def grid(device: torch.device, backend: str | None, rows: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Ranks in so many rows: the groups of this rank's column and of its row. On every rank.

    Raises ``ValueError`` unless the number of ranks divides by `rows`.
    """
    size, rank, name = dist.get_world_size(), dist.get_rank(), _known(device, backend)
    if size % rows:
        raise ValueError(f"{size} ranks do not lie in {rows} rows of one length: give a number that divides them")
    width = size // rows
    columns = [dist.new_group(list(range(first, size, width)), backend=name) for first in range(width)]
    lines = [dist.new_group(list(range(first, first + width)), backend=name) for first in range(0, size, width)]
    return columns[rank % width], lines[rank // width]


def mesh(device: torch.device, backend: str | None = None, replicas: int = 1) -> DeviceMesh:
    """All ranks along one axis, or of two axes so many `replicas` along the first. On every rank."""
    if replicas == 1:
        return DeviceMesh.from_group(group(device, backend), device.type)
    numbers = torch.arange(dist.get_world_size())
    both = list(grid(device, backend, replicas))
    names = ("replicate", "shard")
    return DeviceMesh.from_group(both, device.type, numbers.reshape(replicas, -1), mesh_dim_names=names)


def leave() -> None:
    """Of several methods, the first one that leaves takes the group with it."""
    if not dist.is_initialized():
        return
    dist.barrier()
    if _made:
        dist.destroy_process_group(_made.pop())  # and all others
    else:
        for one in _beside.values():
            dist.destroy_process_group(one)
    _beside.clear()


def _known(device: torch.device, backend: str | None) -> str:
    """The backend's name, which torch knows from now on."""
    name = backend or ("nccl" if device.type == "cuda" else "gloo")
    if name == "dear":
        importlib.import_module("dear.backend")
    return name
