"""Joins torch.distributed, for baselines that run over it, under torchrun or under mpirun on real hosts."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from bench.methods.method import Place
from overlap.job.launch import Launcher, detect

__all__ = ["join", "leave"]

_made: list[dist.ProcessGroup] = []  # here, at most one


def join(device: torch.device) -> Place:
    """Make the process group, unless it is there: gloo for the CPU, NCCL for CUDA.

    Under mpirun the launcher exports MASTER_ADDR and MASTER_PORT.
    """
    if dist.is_initialized():
        return Place(dist.get_rank(), dist.get_world_size())
    launch = detect(os.environ)
    if launch.launcher is not Launcher.TORCHRUN:
        os.environ.update(RANK=str(launch.rank), WORLD_SIZE=str(launch.size))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29400" if launch.size > 1 else "0")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    assert dist.group.WORLD is not None
    _made.append(dist.group.WORLD)
    return Place(dist.get_rank(), dist.get_world_size())


def leave() -> None:
    dist.barrier()
    if _made:
        dist.destroy_process_group(_made.pop())
