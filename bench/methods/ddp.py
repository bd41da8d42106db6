"""torch's DistributedDataParallel, with a plain optimizer or with ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from bench.methods import process_group
from bench.methods.method import MakeOptimizer, Method, MethodUnavailable, Place, tensor_bytes

__all__ = ["Ddp", "DdpZero"]

# Of DDP: it is given the state that it was registered with, and a bucket of gradients.
Hook = Callable[[Any, Any], Any]

_ONE_BUCKET_MB = 2**20
_COMPRESS: Mapping[str, Hook] = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}
_PLAIN_STEPS = 2  # the fewest that PowerSGD may have before it, with error feedback and a warm start


class Ddp(Method):
    """DistributedDataParallel; its options are those of torch's constructor, and hooks that come with torch.

    ``bucket_mb``: ``bucket_cap_mb``; None for torch's default, 25 MB after a first bucket of 1 MB. ``view``: gradients live
    in buckets (``gradient_as_bucket_view``). ``static_graph``: torch is promised the same graph in every step.
    ``compression``: ``bf16`` or ``fp16``, torch's hook that sends gradients in 16 bits. ``powersgd``: the rank of the
    matrices that stand for gradients (PowerSGD, 1905.13727), from the third step on, with error feedback; in buckets of
    ``bucket_mb``, each with a process group of its own, or all in one where that is None. ``backend``: what
    torch.distributed runs over; None: gloo for the CPU, NCCL for CUDA.
    """

    name = "ddp"
    launchers = ("torchrun", "mpi")
    defaults: ClassVar[Mapping[str, Any]] = {
        "bucket_mb": None,
        "view": False,
        "static_graph": False,
        "compression": None,
        "powersgd": None,
        "backend": None,
    }
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "compression": tuple(_COMPRESS),
        "backend": process_group.BACKENDS,
    }

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        if self.options["powersgd"] is not None and self.options["compression"] is not None:
            raise ValueError(f"powersgd and compression of {self.name} both say what gradients become: leave one out")

    def join(self, device: torch.device) -> Place:
        self._device = device
        return process_group.join(device, self.options["backend"])

    @property
    def _group(self) -> dist.ProcessGroup:
        return process_group.group(self._device, self.options["backend"])

    def _wrap(self, model: nn.Module) -> DistributedDataParallel:
        limit = self.options["bucket_mb"]
        if self.options["powersgd"] is not None and limit is None:
            limit = _ONE_BUCKET_MB
        return DistributedDataParallel(
            model,
            process_group=self._group,
            bucket_cap_mb=limit,
            gradient_as_bucket_view=self.options["view"],
            static_graph=self.options["static_graph"],
        )

    def _hook(self) -> Hook | None:
        """What becomes of a bucket of gradients, instead of DDP's own all-reduce."""
        if self.options["compression"] is not None:
            return _under_another_name(_COMPRESS[self.options["compression"]])
        if self.options["powersgd"] is not None:
            # A static graph is known one step later, and buckets are made once more then.
            plain_steps = _PLAIN_STEPS + self.options["static_graph"]
            return _power_sgd(int(self.options["powersgd"]), plain_steps, dist.get_backend(self._group))
        return None

    def distribute(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        build, arguments = make
        wrapped, hook = self._wrap(model), self._hook()
        if hook is not None:
            wrapped.register_comm_hook(self._group, hook)
        return wrapped, build(model.parameters(), **arguments)

    def bytes_over(self) -> str:
        return str(dist.get_backend(self._group))

    def leave(self) -> None:
        process_group.leave()


class DdpZero(Ddp):
    """DDP with ZeroRedundancyOptimizer: every rank updates some parameters, holds their state, and broadcasts them.

    ``parameter_view``: parameters live in buckets, which are broadcast as they are (``parameters_as_bucket_view``).
    ``overlap``: they are updated and broadcast in backward (``overlap_with_ddp``), which torch refuses over gloo, so it
    needs GPUs; nothing is updated in the first two or three steps.
    """

    name = "ddp-zero"
    defaults: ClassVar[Mapping[str, Any]] = {**Ddp.defaults, "parameter_view": False, "overlap": False}

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        if self.options["overlap"] and self.options["parameter_view"]:
            raise ValueError("overlap of ddp-zero has DDP's buckets for parameters, too: leave parameter_view out")

    def look(self) -> None:
        if self.options["overlap"] and not torch.cuda.is_available():
            raise MethodUnavailable("overlap of ddp-zero needs NCCL, and so GPUs: torch refuses it over gloo")

    def distribute(self, model: nn.Module, make: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        build, arguments = make
        wrapped, hook = self._wrap(model), self._hook()
        zero = ZeroRedundancyOptimizer(
            model.parameters(),
            optimizer_class=build,  # type: ignore[arg-type]
            process_group=self._group,
            parameters_as_bucket_view=self.options["parameter_view"],
            overlap_with_ddp=self.options["overlap"],
            **arguments,
        )
        if self.options["overlap"]:
            hook = hook_with_zero_step(allreduce_hook if hook is None else hook, wrapped, zero)
        if hook is not None:
            wrapped.register_comm_hook(self._group, hook)
        return wrapped, zero

    def state_bytes(self, optimizer: torch.optim.Optimizer) -> int:
        return tensor_bytes(optimizer.optim.state)  # type: ignore[attr-defined]


# DDP reads the signatures of hooks and knows no annotations that are text, as they are in this file: these have none.


def _under_another_name(compress: Hook) -> Hook:
    """The hook itself. By the name of the one for bf16, torch refuses it without a GPU, though gloo adds bf16 up."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        return compress(state, bucket)

    return hook


def _power_sgd(rank: int, plain_steps: int, backend: str) -> Hook:
    """torch's hook, where each bucket has a process group of its own, over `backend`.

    It issues a bucket's second and third all-reduce when the one before has arrived, from a thread of gloo. In one group
    those of several buckets would come in another order on each rank, and gloo would end the job.
    """
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=plain_steps)
    groups: dict[int, dist.ProcessGroup] = {}

    def hook(_state, bucket):  # type: ignore[no-untyped-def]
        # New ones are made in the first steps. DDP comes here with its buckets in the same order on every rank.
        if bucket.index() not in groups:
            groups[bucket.index()] = dist.new_group(backend=backend)
        state.process_group = groups[bucket.index()]
        return powerSGD_hook(state, bucket)

    return hook
