"""torch's DistributedDataParallel, with a plain optimizer or with ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from bench.methods import process_group
from bench.methods.method import MakeOptimizer, Method, Place, tensor_bytes

__all__ = ["Ddp", "DdpZero"]

_ONE_BUCKET_MB = 2**20
_PLAIN_STEPS = 2  # the fewest that torch allows with error feedback and a warm start


class Ddp(Method):
    """DistributedDataParallel; its options are those of torch's constructor.

    ``bucket_mb``: ``bucket_cap_mb``; None for torch's default, 25 MB after a first bucket of 1 MB. ``view``: gradients live
    in buckets. ``powersgd``: the rank of the matrices that stand for gradients (PowerSGD, 1905.13727), from the third step
    on, with error feedback; None: gradients travel as they are. All are in one bucket then: with several, the hook's later
    all-reduces come in another order on each rank, over gloo, which ends the job.
    """

    name = "ddp"
    launchers = ("torchrun", "mpi")
    defaults: ClassVar[Mapping[str, Any]] = {"bucket_mb": None, "view": False, "powersgd": None}

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        if self.options["powersgd"] is not None and self.options["bucket_mb"] is not None:
            raise ValueError("powersgd has all gradients in one bucket: leave bucket_mb out")

    def join(self, device: torch.device) -> Place:
        return process_group.join(device)

    def _wrap(self, model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(
            model,
            bucket_cap_mb=self.options["bucket_mb"] if self.options["powersgd"] is None else _ONE_BUCKET_MB,
            gradient_as_bucket_view=self.options["view"],
        )
        if self.options["powersgd"] is not None:
            rank = int(self.options["powersgd"])
            state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=_PLAIN_STEPS)
            wrapped.register_comm_hook(state, powerSGD_hook)
        return wrapped

    def distribute(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        build, arguments = make
        return self._wrap(model), build(model.parameters(), **arguments)

    def leave(self) -> None:
        process_group.leave()


class DdpZero(Ddp):
    """DDP with ZeroRedundancyOptimizer: every rank updates some parameters, holds their state, and broadcasts them."""

    name = "ddp-zero"

    def distribute(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        build, arguments = make
        wrapped = self._wrap(model)
        return wrapped, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=build, **arguments)  # type: ignore[arg-type]

    def state_bytes(self, optimizer: torch.optim.Optimizer) -> int:
        return tensor_bytes(optimizer.optim.state)  # type: ignore[attr-defined]
