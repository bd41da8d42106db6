"""Which modules were given to ``fully_shard()``, and what it was told about each."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from overlap.job.groups import ShardGroups
from overlap.job.session import current
from overlap.optimizer.distributed import DistributedOptimizer

__all__ = [
    "Root",
    "Unit",
    "has_unit",
    "outermost",
    "outermost_with",
    "register",
    "root_of",
    "taken",
    "unit_of",
    "units_in",
    "unregister",
]

_MODULES: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_ATTRIBUTE = "_fully_sharded"


@dataclass(eq=False)
class Unit:
    """A module that was given to ``fully_shard()``, and the parameters that it is the first to have."""

    kind: type[torch.nn.Module]  # the module's own class
    parameters: list[torch.nn.Parameter]
    groups: tuple[tuple[int, ...], ...]  # of ranks, within each of which they are sharded, and averaged over all …
    by_default_group: bool  # … by their numbers in torch.distributed's default group, not in the job
    stays: bool | None = None  # whole from forward to backward; None: as the plan has it
    post_forward: int | None = None  # sharded among so many ranks in that time
    reduce_dtype: torch.dtype | None = None  # of gradients that travel …
    param_dtype: torch.dtype | None = None  # … and of parameters that are used; None: their own
    offload: bool = False  # shards of a model on a GPU lie in the CPU's memory
    casts: bool = False  # inputs of forward to `param_dtype`
    elementwise: bool | None = None  # promises about the optimizer …
    per_parameter: bool | None = None  # … of all units of the model
    threshold_mb: float | None = None  # of the outermost one: what only it has is cut into buckets of this size
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the outermost one: more of the optimizer's
    two_level: ShardGroups = None  # of the outermost one: see `overlap.job.groups`
    options: Any = None  # of fairscale's wrapper around the module, if there is one: `fsdp.options.Options`
    rest: bool = False  # what a wrapper that comes later takes over
    root: Root | None = None
    calls: int = 0  # of the module, that are going on

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks over which gradients are averaged, in ascending order."""
        return tuple(sorted(rank for group in self.groups for rank in group))

    @property
    def sharers(self) -> tuple[int, ...]:
        """Those of them among which this rank's group divides parameters."""
        return next(group for group in self.groups if current().comm.rank in group)

    @property
    def optimizer(self) -> DistributedOptimizer | None:
        """The only one of the :attr:`optimizers`, or None."""
        return self.optimizers[0] if len(self.optimizers) == 1 else None

    @property
    def optimizers(self) -> list[DistributedOptimizer]:
        """The optimizers that train the model, once there are any."""
        return [] if self.root is None else self.root.optimizers


@dataclass(eq=False)
class Root:
    """A model: the outermost of its modules that were given to ``fully_shard()``."""

    syncs: bool = True  # gradients of the next backward passes are reduced
    units: list[Unit] = field(default_factory=list)  # the outermost one first
    _optimizers: list[weakref.ref[DistributedOptimizer]] = field(default_factory=list)

    @property
    def optimizers(self) -> list[DistributedOptimizer]:
        """Those that the script has not let go of, in the order of the first of their parameters."""
        return [optimizer for each in self._optimizers if (optimizer := each()) is not None]

    def train(self, optimizers: Iterable[DistributedOptimizer]) -> None:
        """Be trained by `optimizers` from now on."""
        self._optimizers = [weakref.ref(each) for each in optimizers]
        self.sync(self.syncs)

    def sync(self, syncs: bool) -> None:
        """Reduce the gradients of the next backward passes, or not."""
        self.syncs = syncs
        for each in self.optimizers:
            each._engine.suspended = not syncs


def register(module: torch.nn.Module, unit: Unit) -> None:
    """Note `unit` of `module`."""
    module.__dict__[_ATTRIBUTE] = unit
    _MODULES.add(module)


def unregister(module: torch.nn.Module) -> None:
    """Forget what was noted of `module`, which is of its own class again."""
    module.__class__ = unit_of(module).kind
    del module.__dict__[_ATTRIBUTE]
    _MODULES.discard(module)


def attributes_of(module: Any) -> dict[str, Any]:
    """The attributes of `module`, without what was noted."""
    return {name: value for name, value in vars(module).items() if name != _ATTRIBUTE}


def has_unit(module: Any) -> bool:
    """Whether `module` was given to ``fully_shard()``."""
    return _ATTRIBUTE in vars(module)


def unit_of(module: Any) -> Unit:
    """What was noted of `module`, which was given to ``fully_shard()``."""
    found: Unit = vars(module)[_ATTRIBUTE]
    return found


def units_in(modules: Iterable[Any]) -> list[Unit]:
    """The units of `modules` and of those inside them, from the outside to the inside."""
    inside = dict.fromkeys(each for module in modules for each in module.modules())
    return [unit_of(each) for each in inside if has_unit(each)]


def taken(*, sharded: bool = False) -> set[int]:
    """The ids of all parameters that belong to a unit: tied ones may do so beside the module that is asked about.

    With `sharded`, of those models that are trained.
    """
    units = [unit_of(module) for module in _MODULES]
    return {id(each) for unit in units if not sharded or unit.optimizers for each in unit.parameters}


def outermost(module: Any) -> torch.nn.Module:
    """The module around `module`, or itself, that is in no other module that was given to ``fully_shard()``."""
    around = [each for each in _MODULES if any(inner is module for inner in each.modules())]
    return max(around, key=lambda each: sum(1 for _ in each.modules()))


def outermost_with(parameters: set[int]) -> list[torch.nn.Module]:
    """The outermost modules of those units that have some of the `parameters`, which are ids."""
    having = [each for each in _MODULES if any(id(one) in parameters for one in unit_of(each).parameters)]
    return list(dict.fromkeys(outermost(each) for each in having))


def root_of(module: Any) -> Root:
    """The model of `module`, which is the outermost one."""
    unit = unit_of(module)
    if unit.root is None:
        unit.root = Root()
    return unit.root
