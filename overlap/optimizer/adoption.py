"""Turns a plain torch optimizer into a distributed one, in place: a script made it and goes on using that object.

The object becomes a ``DistributedOptimizer`` and stays an instance of its own class. What it was, its groups, its state,
and its attributes, moves into a twin of its old class, which the distributed one wraps.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from overlap.core.gates.gates import listed
from overlap.job.session import current
from overlap.optimizer.arguments import SharedArguments
from overlap.optimizer.distributed import DistributedOptimizer
from overlap.plan.strategy import Strategy

__all__ = ["adopt", "optimizer_of", "optimizers_of", "refuse_strangers"]

_TRACKED = "_wrapped_by_lr_sched"  # what torch's schedulers look for on `step`


def optimizers_of(parameters: Collection[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """The optimizers of this process that train some of `parameters`; not the wrappers of others."""
    wanted = set(map(id, parameters))
    return [each for each in _alive() if any(id(param) in wanted for param in _parameters_of(each))]


def optimizer_of(model: torch.nn.Module, what: str) -> torch.optim.Optimizer | None:
    """The plain optimizer that trains `model`, which `what` is about to shard; None where there is none yet.

    Raises ``RuntimeError`` for several, or one that is distributed already.
    """
    trained = [each for each in model.parameters() if each.requires_grad]
    found = optimizers_of(trained)
    if found and (len(found) > 1 or current().registry.having(trained)):
        names = ", ".join(type(each).__name__ for each in found)
        raise RuntimeError(
            f"the parameters of {type(model).__name__} belong to {len(found)} optimizer(s) ({names}), and {what} "
            "works with one that no DistributedOptimizer wraps; it may have several parameter groups"
        )
    return found[0] if found else None


@functools.cache
def refuse_strangers(taken: Callable[[], set[int]]) -> None:
    """From now on, look at each optimizer of this process that steps: whether it has parameters that are `taken`, by id."""
    register_optimizer_step_pre_hook(functools.partial(_refuse_stranger, taken))


def _refuse_stranger(taken: Callable[[], set[int]], optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Raise ``RuntimeError`` where `optimizer` is a plain one, made later, of parameters that are sharded."""
    mine = (
        id(param) for group in optimizer.param_groups for param in listed(group["params"])
    )  # of others' wrappers, too
    if not isinstance(optimizer, DistributedOptimizer) and not taken().isdisjoint(mine):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step(): parameters of this optimizer are sharded already, with what their "
            "model's first training pass has found. Make all optimizers before that pass, and use those; "
            "add_param_group() adds parameters to one"
        )


def _alive() -> Iterator[torch.optim.Optimizer]:
    for each in gc.get_objects():
        if issubclass(type(each), torch.optim.Optimizer) and "param_groups" in vars(each):
            yield each


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in vars(optimizer)["param_groups"]:
        yield from listed(group["params"])


def adopt(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    strategy: Callable[[torch.optim.Optimizer], Strategy],
    arguments: SharedArguments,
    beside: DistributedOptimizer | None = None,
) -> DistributedOptimizer:
    """Make `optimizer` a distributed one of `model`, with the strategy that `strategy` makes for it, and return it.

    It shares its passes with the one `beside` it: :class:`.DistributedOptimizer`.
    On every rank. Raises as :class:`.DistributedOptimizer`; the optimizer is as before then.
    """
    kind: Any = type(optimizer)
    attributes = vars(optimizer)
    twin: torch.optim.Optimizer = object.__new__(kind)
    twin.__dict__ = {name: value for name, value in attributes.items() if not hasattr(value, _TRACKED)}
    optimizer.__dict__ = {}
    optimizer.__class__ = _distributed(kind)
    assert isinstance(optimizer, DistributedOptimizer)
    try:
        DistributedOptimizer.__init__(optimizer, twin, model, strategy(twin), arguments, beside=beside)
    except BaseException:
        optimizer.__class__ = kind
        optimizer.__dict__ = attributes
        raise
    if "step" in attributes and hasattr(attributes["step"], _TRACKED):
        optimizer.__dict__["step"] = _tracked(optimizer)
    return optimizer


@functools.cache
def _distributed(kind: Any) -> type[DistributedOptimizer]:
    return type(kind.__name__, (DistributedOptimizer, kind), {"__module__": kind.__module__})


def _tracked(optimizer: DistributedOptimizer) -> Callable[..., Any]:
    """``optimizer.step`` as a scheduler, which was made before, has left it."""
    reference, step = weakref.ref(optimizer), type(optimizer).step

    @functools.wraps(step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        mine = reference()
        assert mine is not None, "who calls its method has it"
        return step(mine, *args, **kwargs)

    setattr(tracked, _TRACKED, True)
    return tracked
