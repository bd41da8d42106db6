"""torch's DistributedDataParallel, with a plain optimizer or with ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from bench.methods import process_group
from bench.methods.method import MakeOptimizer, Method, Place, tensor_bytes

__all__ = ["Ddp", "DdpZero"]


class Ddp(Method):
    """Options of torch's constructor.

    ``bucket_mb``: ``bucket_cap_mb``; None for torch's default, 25 MB after a first bucket of 1 MB. ``view``: gradients live
    in buckets.
    """

    name = "ddp"
    launchers = ("torchrun", "mpi")
    defaults: ClassVar[Mapping[str, Any]] = {"bucket_mb": None, "view": False}

    def join(self, device: torch.device) -> Place:
        return process_group.join(device)

    def _wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(
            model,
            bucket_cap_mb=self.options["bucket_mb"],
            gradient_as_bucket_view=self.options["view"],
        )

    def distribute(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        build, arguments = make
        return self._wrap(model), build(model.parameters(), **arguments)

    def leave(self) -> None:
        process_group.leave()


class DdpZero(Ddp):
    """Every rank holds the optimizer state of some parameters, updates them, and broadcasts them."""

    name = "ddp-zero"

    def distribute(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        build, arguments = make
        wrapped = self._wrap(model)
        return wrapped, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=build, **arguments)  # type: ignore[arg-type]

    def state_bytes(self, optimizer: torch.optim.Optimizer) -> int:
        return tensor_bytes(optimizer.optim.state)  # type: ignore[attr-defined]
