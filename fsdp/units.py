"""Which modules were given to ``fully_shard()``, and what it was told about each."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

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
    ranks: tuple[int, ...]  # among which they are sharded, in ascending order
    stays: bool | None = None  # whole from forward to backward; None: as the plan has it
    reduce_dtype: torch.dtype | None = None  # of gradients that travel …
    param_dtype: torch.dtype | None = None  # … and of parameters that are used; None: their own
    casts: bool = False  # inputs of forward to `param_dtype`
    threshold_mb: float | None = None  # of the outermost one: what only it has is cut into buckets of this size
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the outermost one: more of the optimizer's
    options: Any = None  # of fairscale's wrapper around the module, if there is one: `fsdp.options.Options`
    rest: bool = False  # what a wrapper that comes later takes over
    root: Root | None = None
    calls: int = 0  # of the module, that are going on

    @property
    def optimizer(self) -> DistributedOptimizer | None:
        """The optimizer that trains the model, once there is one."""
        return None if self.root is None else self.root.optimizer


@dataclass(eq=False)
class Root:
    """A model: the outermost of its modules that were given to ``fully_shard()``."""

    syncs: bool = True  # gradients of the next backward passes are reduced
    units: list[Unit] = field(default_factory=list)  # the outermost one first
    _optimizer: weakref.ref[DistributedOptimizer] | None = None

    @property
    def optimizer(self) -> DistributedOptimizer | None:
        return None if self._optimizer is None else self._optimizer()

    def train(self, optimizer: DistributedOptimizer) -> None:
        """Be trained by `optimizer` from now on."""
        self._optimizer = weakref.ref(optimizer)
        optimizer._engine.suspended = not self.syncs


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
    return {id(each) for unit in units if not sharded or unit.optimizer is not None for each in unit.parameters}


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
