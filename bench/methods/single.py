"""The method without communication, in which every rank trains alone: it shows what computation takes."""

from __future__ import annotations

import os

import torch
from torch import nn

from bench.methods.method import MakeOptimizer, Method, Place
from overlap.job.launch import detect

__all__ = ["Single"]


class Single(Method):
    """The lower bound of all methods where the network is fast. Ranks do not agree afterwards."""

    name = "none"
    launchers = ("mpi", "torchrun")

    def join(self, device: torch.device) -> Place:
        launch = detect(os.environ)
        return Place(launch.rank, launch.size)

    def distribute(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        build, arguments = make
        return model, build(model.parameters(), **arguments)

    def leave(self) -> None:
        pass
