"""fairscale's ShardedDataParallel: during backward, gradients go to the ranks that own their parameters."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from oss.optimizer import DistributedOptimizer
from oss.ranks import Ranks, ranks_of
from oss.sharded_optimizer import OSS
from overlap.api import clip_grad_norm_
from overlap.horovod.functions import broadcast_parameters
from overlap.horovod.job import init
from overlap.job.session import current, is_initialized
from overlap.optimizer.arguments import refuses_unknown
from overlap.transport.compression import Compression

__all__ = ["ShardedDDP", "ShardedDataParallel"]

log = logging.getLogger("dear")


class ShardedDataParallel(torch.nn.Module):
    """A wrapper of `module` that averages gradients and sends them to their parameters' owners during backward.

    ``optimizer.step()`` then updates what this rank owns. New values come back while the next forward runs: whoever looks
    at a parameter waits for it.

    Args:
        module: not in DistributedDataParallel; its attributes are also this one's.
        sharded_optimizer: an OSS, or several, each with some of the module's parameters. Each belongs to one module.
        process_group: the group of the OSS, which is what None means. Other groups raise ``ValueError``.
        broadcast_buffers: every ``step()`` of the first optimizer gives all ranks the first rank's buffers.
        sync_models_at_startup: take the first rank's parameters, buffers and optimizer state now.
        reduce_buffer_size: elements of a bucket; 0: a bucket for each layer; None: ``threshold_mb="auto"`` of
            ``oss.DistributedOptimizer``, which plans by itself.
        auto_refresh_trainable: ``False`` raises ``ValueError``: parameters that are frozen or thawed are always followed.
        reduce_fp16: gradients travel in float16, and are summed in float32.
        warn_on_trainable_params_changed: log a warning when other parameters are trained than in the forward pass before.

    On every rank of the group, whose job this process joins (``oss.init()``) unless it has. Raises ``RuntimeError`` and
    ``ValueError`` where ranks, groups or parameters do not fit together, ``TypeError`` for arguments of other kinds.
    """

    @refuses_unknown(of="ShardedDataParallel")
    def __init__(
        self,
        module: torch.nn.Module,
        sharded_optimizer: OSS | list[OSS] | tuple[OSS, ...],
        process_group: Any = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int | None = None,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
    ) -> None:
        super().__init__()
        optimizers = list(sharded_optimizer) if isinstance(sharded_optimizer, list | tuple) else [sharded_optimizer]
        if not isinstance(module, torch.nn.Module) or not all(isinstance(each, OSS) for each in optimizers):
            raise TypeError(
                "ShardedDataParallel takes a module and its OSS, or a list of them, and was given "
                f"{type(module).__name__} and {', '.join(type(each).__name__ for each in optimizers)}"
            )
        if not optimizers:
            raise ValueError("ShardedDataParallel was given no OSS: gradients would not be reduced")
        if not auto_refresh_trainable:
            raise ValueError(
                "auto_refresh_trainable=False: parameters that are frozen or thawed are always followed here; leave it out"
            )
        if reduce_buffer_size is not None and reduce_buffer_size < 0:
            raise ValueError(f"reduce_buffer_size should be at least 0 elements and is {reduce_buffer_size}")
        for optimizer in optimizers:
            _join(optimizer.ranks, process_group)
        self.module = module
        devices = {parameter.device for parameter in module.parameters()}
        self.is_multi_device_module = len(devices) > 1  # this and the next as in DistributedDataParallel
        self.device_type = next(iter(devices), torch.device("cpu")).type
        self._optimizers = optimizers
        width = max((parameter.element_size() for parameter in module.parameters()), default=4)
        for number, optimizer in enumerate(optimizers):
            options = {
                "compression": Compression.fp16 if reduce_fp16 else Compression.none,
                "threshold_mb": "auto" if reduce_buffer_size is None else reduce_buffer_size * width / 2**20,
                "gather_dtype": torch.float16 if optimizer.broadcast_fp16 else None,
                "sync_start": sync_models_at_startup,
                "broadcast_buffers": broadcast_buffers and number == 0,
            }
            optimizer.reduced_by(partial(_Reduced, module, options))
        known = {id(parameter) for each in optimizers for group in each.param_groups for parameter in group["params"]}
        self._parameters_of_nobody = [parameter for parameter in module.parameters() if id(parameter) not in known]
        self._all = tuple(module.parameters())
        self._trained = self._mask() if warn_on_trainable_params_changed else None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def _mask(self) -> tuple[bool, ...]:
        return tuple(parameter.requires_grad for parameter in self._all)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._trained is not None and self._trained != (mask := self._mask()):
            log.warning("ShardedDataParallel: %d parameters are trained, which were %d", sum(mask), sum(self._trained))
            self._trained = mask
        return self.module(*inputs, **named)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate on this rank; the first one outside, or ``step()``, reduces them all."""
        with contextlib.ExitStack() as stack:
            for optimizer in self._optimizers:
                stack.enter_context(_shell(optimizer).no_sync())
            yield

    def reduce(self) -> None:
        """Average every ``.grad`` now; ``step()`` needs no such call. After backward, on every rank."""
        for optimizer in self._optimizers:
            _shell(optimizer).synchronize()

    def sync_buffers(self, blocking: bool = False) -> None:
        """Give all ranks the first one's buffers now. On every rank; it always waits for them, so both values are met."""
        broadcast_parameters(list(self.module.named_buffers()), root_rank=0)

    def refresh_trainable(self) -> None:
        """Do nothing: every step looks at ``requires_grad`` by itself."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients as in torch, without waiting for parameters that are in flight. On every rank."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)
        for parameter in self._parameters_of_nobody:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()


ShardedDDP = ShardedDataParallel


class _Reduced:
    """The steps of ``oss.DistributedOptimizer``, for an OSS; see :class:`oss.sharded_optimizer.Updates`."""

    def __init__(self, module: torch.nn.Module, options: dict[str, Any], front: OSS) -> None:
        self._front = front
        self.shown: Any = DistributedOptimizer(front.optim, module, per_parameter=True, **options)

    @property
    def owners(self) -> Mapping[torch.Tensor, int]:
        """Of those that have one: what has sparse gradients is updated by all ranks."""
        if not self.shown.buckets:
            raise RuntimeError(
                "under ShardedDataParallel parameters get their owners in the first step(): ask after it"
            )
        found = {}
        for bucket in self.shown.buckets:
            ends = list(itertools.accumulate(bucket.shares))
            for slot, offset in zip(bucket.slots, bucket.spec.offsets, strict=True):
                if bucket.sharded:
                    found[slot.param] = next(rank for rank, end in enumerate(ends) if offset < end)
        return found

    def step(self, closure: Callable[[], Any] | None, **options: Any) -> Any:
        told = {name: value for name, value in vars(self._front).items() if name in ("grad_scale", "found_inf")}
        for name, value in told.items():  # a GradScaler leaves them, and takes them away again
            setattr(self.shown, name, value)
        try:
            return self.shown.step(closure, **options)
        finally:
            for name in told:
                delattr(self.shown, name)

    def check_scaler(self, agreed: bool) -> None:
        """Any will do: all ranks see the same averages."""

    def clip(self, wanted: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        return clip_grad_norm_(wanted, max_norm, norm_type)

    def consolidate(self, recipient: int) -> None:
        """Any rank may ask for whole state at any time."""

    def state_dict(self) -> dict[str, Any]:
        return self.shown.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shown.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.shown.add_param_group(param_group)


def _shell(optimizer: OSS) -> Any:
    return optimizer._updates.shown


def _join(ranks: Ranks, process_group: Any) -> None:
    """A session of those ranks, unless there is one. Raises ``ValueError`` where it is, or the group has, other ranks."""
    if process_group is not None and ranks_of(process_group).members != ranks.members:
        raise ValueError(
            f"process_group has ranks {ranks_of(process_group).members} and the OSS's group {ranks.members}: give both the "
            "same, OSS as group="
        )
    if not is_initialized():
        world = ranks.group is None or ranks.group is torch.distributed.group.WORLD
        init(None if world else ranks.group)
    comm = current().comm
    if (comm.rank, comm.size) != (ranks.rank, ranks.size):
        raise ValueError(
            f"this process is rank {comm.rank} of {comm.size} in the job and {ranks.rank} of {ranks.size} in the process "
            "group: give the group to oss.init(comm=group) first"
        )
