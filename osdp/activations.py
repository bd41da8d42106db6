"""Blocks that backward may compute again, so that what they save for it need not be kept: activation checkpoints.

measured   what autograd saves between a block's entry and its exit
switched   the block's forward runs in `torch.utils.checkpoint`, on all ranks from the same step on
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

__all__ = ["Blocks", "Recompute"]

#: What may be computed again. None: what the model declares; False: nothing.
Recompute = Sequence[torch.nn.Module] | Callable[[torch.nn.Module], bool] | bool | None

_again = partial(checkpoint, use_reentrant=False)


class Blocks:
    """Those of `model` that may be computed again. Raises ``TypeError`` and ``ValueError`` for what cannot be."""

    def __init__(self, model: torch.nn.Module, recompute: Recompute = None) -> None:
        self._modules = _found(model, recompute)
        self._named = recompute is not None  # by the script
        self._measures: dict[str, _Measure] = {}
        self._on: dict[str, Callable[[], None]] = {}  # how to switch off what is on

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._modules)

    def measure(self) -> None:
        """Begin, in passes that compute nothing again, or begin anew."""
        self.stop()
        self._measures = {name: _Measure(module) for name, module in self._modules.items()}

    def measured(self, passes: int) -> dict[str, int | None]:
        """Bytes that each block has saved at most in one of so many forward `passes`.

        None: it cannot be computed again, as its forward changes buffers; 0: another checkpoint computes it again.
        """
        return {name: each.most(passes) for name, each in self._measures.items()}

    def stop(self) -> None:
        """Measure no more."""
        for each in self._measures.values():
            each.remove()
        self._measures.clear()

    def end(self) -> None:
        """Measure no more, and compute nothing again: nobody trains the model."""
        self.stop()
        self.switch(())

    def of_all(self, told: Sequence[dict[str, int | None]]) -> dict[str, int]:
        """What was :meth:`measured` on all ranks: the most of any. Raises ``ValueError`` for what the script has named."""
        found = {}
        for name in self._modules:
            each = [mine[name] for mine in told]
            if None in each and self._named:
                raise ValueError(_BUFFERS.format(name))
            found[name] = 0 if None in each or 0 in each else max(nbytes for nbytes in each if nbytes is not None)
        return found

    def switch(self, names: Collection[str]) -> None:
        """From now on, backward computes blocks of these `names` again, and no others. On every rank, between passes."""
        for name in [name for name in self._on if name not in names]:
            self._on.pop(name)()
        for name in names:
            if name not in self._on:
                self._on[name] = _switched(self._modules[name])


def _switched(module: torch.nn.Module) -> Callable[[], None]:
    """Have backward compute `module` again. Returns what undoes it."""
    if _declares(module):  # it knows what of its arguments it must not be called with twice
        own: Any = module
        own.gradient_checkpointing, own._gradient_checkpointing_func = True, _again

        def off() -> None:
            own.gradient_checkpointing = False

        return off
    before = module.__dict__.get("forward")
    module.forward = partial(_again, module.forward)  # type: ignore[method-assign]  # gates stay around it

    def undo() -> None:
        del module.forward
        if before is not None:
            module.forward = before  # type: ignore[method-assign]

    return undo


# - Which


_BUFFERS = (
    "recompute: {!r} changes buffers in forward, which computing it again would change twice: leave it out, or "
    "name blocks inside"
)


def _found(model: torch.nn.Module, recompute: Recompute) -> dict[str, torch.nn.Module]:
    modules = dict(model.named_modules())
    if recompute is None:
        if any(getattr(module, "gradient_checkpointing", False) is True for module in modules.values()):
            return {}  # the script has them computed again
        declared = {name: module for name, module in modules.items() if _declares(module)}
        return {name: module for name, module in _outermost(declared) if _why_not(modules, name) is None}
    if recompute is False:
        return {}
    if callable(recompute):
        wanted = {name: module for name, module in modules.items() if recompute(module)}
    elif isinstance(recompute, Sequence) and all(isinstance(each, torch.nn.Module) for each in recompute):
        names = {module: name for name, module in modules.items()}
        strange = [type(each).__name__ for each in recompute if each not in names]
        if strange:
            raise ValueError(
                f"recompute has {', '.join(strange)}, and {type(model).__name__} has no such modules inside"
            )
        wanted = {names[each]: each for each in recompute}
    else:
        raise TypeError(
            f"recompute should be None, False, modules of the model, or a function that is given each, and is {recompute!r}"
        )
    found = dict(_outermost(wanted))
    for name in found:
        problem = _why_not(modules, name)
        if problem is not None:
            raise ValueError(problem)
    return found


def _declares(module: torch.nn.Module) -> bool:
    """Whether it is one of transformers' layers that say so."""
    return any(
        kind.__name__ == "GradientCheckpointingLayer" and kind.__module__.startswith("transformers.")
        for kind in type(module).__mro__
    )


def _outermost(found: dict[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in found.items():
        parts = name.split(".")
        if not any(".".join(parts[:end]) in found for end in range(1, len(parts))) and ("" not in found or not name):
            yield name, module


def _why_not(modules: dict[str, torch.nn.Module], name: str) -> str | None:
    """Why this one cannot be computed again."""
    module = modules[name]
    if any(isinstance(each, _NormBase) and each.track_running_stats for each in module.modules()):
        return _BUFFERS.format(name)
    if getattr(module, "gradient_checkpointing", False) is True:
        return f"recompute: the script has {name!r} computed again already: leave it out"
    parts = name.split(".")
    around = [modules[".".join(parts[:end])] for end in range(1, len(parts))] + [modules[""]]
    if isinstance(module, torch.jit.ScriptModule) or any(map(_compiled, (*module.modules(), *around))):
        return f"recompute: {name!r} is compiled, or inside of what is, and its compiler decides: leave it out"
    return None


def _compiled(module: torch.nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


# - What they save


class _Measure:
    """Of one block: what autograd saves while its forward runs, but for parameters, and what comes in or goes out."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._open: list[tuple[saved_tensors_hooks, dict[int, int], list[Any]]] = []
        self._found: list[int] = []
        self._changes = False  # buffers
        self._again = False  # another checkpoint computes it again
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def most(self, passes: int) -> int | None:
        if self._changes:
            return None
        if self._again:
            return 0
        return max(self._found, default=0) * -(-len(self._found) // passes)

    def _enter(self, _module: Any, _args: Any, _kwargs: Any) -> None:
        if torch._C._current_graph_task_id() >= 0:
            self._again = True
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            base = tensor if tensor._base is None else tensor._base
            if not isinstance(base, torch.nn.Parameter) and tensor.layout is torch.strided:
                saved[_place(tensor)] = tensor.untyped_storage().nbytes()
            return tensor.detach()  # else an output would hold what holds it

        hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
        hooks.__enter__()
        self._open.append((hooks, saved, self._buffers()))

    def _leave(self, _module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not self._open:
            return  # measured since it was entered
        hooks, saved, buffers = self._open.pop()
        hooks.__exit__(None, None, None)
        self._changes = self._changes or buffers != self._buffers()
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0:
            return
        others = (*tree_leaves((args, kwargs, output)), *self._module.buffers())
        there = {_place(each) for each in others if isinstance(each, torch.Tensor) and each.layout is torch.strided}
        self._found.append(sum(nbytes for place, nbytes in saved.items() if place not in there))

    def _buffers(self) -> list[Any]:
        return [(name, id(each), each._version) for name, each in self._module.named_buffers()]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
