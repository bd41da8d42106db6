"""``OptimalShardedDataParallel``, as scripts of the published OSDP write it: around a module, for a plain optimizer.

sharded = OptimalShardedDataParallel(module, [layers, hidden, config], limit_mb)
optimizer = Adam(sharded.parameters())
sharded(x=sample, y=3)          the first time gradients can come: finds the optimizer, and distributes it
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch

from osdp.activations import Blocks, Recompute
from osdp.optimizer import watched
from osdp.planned import plan
from osdp.slices import split
from osdp.strategy import Osdp
from osdp.watching import Watching
from overlap import api
from overlap.job.session import current
from overlap.optimizer.adoption import adopt, optimizer_of, refuse_strangers
from overlap.optimizer.arguments import SharedArguments
from overlap.optimizer.distributed import DistributedOptimizer
from overlap.optimizer.sharding import needs_owners, refuse_what_is_lost, sizes
from overlap.optimizer.start import agree_on_strategy
from overlap.transport.objects import agree

__all__ = ["OptimalShardedDataParallel"]

_WRAPPERS: weakref.WeakSet[OptimalShardedDataParallel] = weakref.WeakSet()


class OptimalShardedDataParallel(torch.nn.Module):
    """Shards `module` under a memory limit, in its first pass that may train it. On every rank; ``init()`` is called here.

    Args:
        module: a module, or a class, of which one is constructed with the `config`, and as published with a list of a 0 for
            each layer where it takes an `execution_plan`: what is sharded is decided here.
        model_description: ``[layers, hidden, config]``; of a module, none of it is needed.
        device_information: the MB (2^20 bytes) that a rank's process may have in memory.
        slices: into how many slices linear layers are split, here, by name: :func:`osdp.split`. ``"auto"``: as
            ``osdp.plan`` finds, by rank 0. The optimizer is to be made afterwards. None: no layer.
        recompute: this, `threshold_mb` and `whole_mb` in the `options`: as for ``osdp.DistributedOptimizer``.

    Whatever forward is called with goes to the module, and names of attributes that this has not are the module's.
    ``state_dict()`` has names with "module." before them, as DDP's.
    """

    def __init__(
        self,
        module: torch.nn.Module | type[torch.nn.Module],
        model_description: Sequence[Any],
        device_information: float,
        *,
        recompute: Recompute = None,
        slices: Mapping[str, int] | Literal["auto"] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(device_information, bool) or not isinstance(device_information, int | float):
            raise TypeError(f"device_information should be a memory limit in MB and is {device_information!r}")
        if not device_information > 0:
            raise ValueError(f"device_information should be a memory limit above 0 MB and is {device_information}")
        if not api.is_initialized():
            api.init()
        self.module = module if isinstance(module, torch.nn.Module) else _built(module, model_description)
        refuse_what_is_lost(self.module, "osdp")
        if slices == "auto":
            limit, ranks = device_information / 2**10, api.size()
            found = plan(self.module, memory_limit_gb=limit, ranks=ranks, slices="auto").slices
            split(self.module, agree(current().control, found))
        elif slices is not None:
            split(self.module, slices)
        self._limit, self._options = int(device_information * 2**20), options
        self._blocks = Blocks(self.module, recompute)
        self._optimizer: weakref.ref[DistributedOptimizer] | None = None
        _WRAPPERS.add(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is None and torch.is_grad_enabled():
            self._begin()
        return self.module(*args, **kwargs)

    @property
    def optimizer(self) -> DistributedOptimizer | None:
        """The optimizer that trains the module, once there is one; its ``explain()`` has the plan."""
        return None if self._optimizer is None else self._optimizer()

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes that this rank's process had in memory in a step, since the plan is settled; None before it is.

        The rank counts: others have peaks of their own. What the limit is for; it begins anew with each plan.
        """
        optimizer = self.optimizer
        watching = None if optimizer is None else optimizer._planned
        return watching.peak if isinstance(watching, Watching) and not watching.under_way else None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)

    def _begin(self) -> None:
        found = optimizer_of(self.module, "OptimalShardedDataParallel")
        if found is None:
            return
        agree_on_strategy("osdp")
        refuse_strangers(_sharded)
        strategy = partial(_strategy, self._limit, self._blocks, self._options)
        self._optimizer = weakref.ref(watched(adopt(found, self.module, strategy, SharedArguments())))


def _strategy(limit: int, blocks: Blocks, options: dict[str, Any], optimizer: torch.optim.Optimizer) -> Osdp:
    owned = needs_owners(optimizer, SharedArguments())
    return Osdp(*sizes(optimizer, **options), limit, blocks=blocks, owned=owned)


def _sharded() -> set[int]:
    """The ids of parameters that are sharded."""
    return {id(each) for wrapper in _WRAPPERS if wrapper.optimizer is not None for each in wrapper.parameters()}


def _built(kind: Any, description: Sequence[Any]) -> torch.nn.Module:
    if len(description) != 3:
        raise ValueError(f"model_description should be [layers, hidden, config] and is {description!r}")
    layers, _, config = description
    planned = "execution_plan" in inspect.signature(kind).parameters
    built: torch.nn.Module = kind(config, execution_plan=[0] * layers) if planned else kind(config)
    return built
