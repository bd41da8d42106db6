"""Activation checkpointing with fairscale's names: ``torch.utils.checkpoint`` around a module's forward."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from overlap.optimizer.arguments import refuses_unknown

__all__ = ["checkpoint_wrapper", "disable_checkpointing"]


class _Switch(threading.local):
    """Whether forward passes of this thread are checkpointed."""

    on = True


_switch = _Switch()


@contextlib.contextmanager
def disable_checkpointing() -> Iterator[None]:
    """A context in which this thread's forward passes keep all activations, whatever was wrapped. On any rank."""
    with _switched(False):
        yield


@contextlib.contextmanager
def _switched(on: bool) -> Iterator[None]:
    before, _switch.on = _switch.on, on
    try:
        yield
    finally:
        _switch.on = before


@refuses_unknown(of="checkpoint_wrapper")
def checkpoint_wrapper(module: torch.nn.Module, offload_to_cpu: bool = False) -> torch.nn.Module:
    """Have `module` recompute its forward pass in backward instead of keeping what that leaves. Returns `module` itself.

    On any rank, before or after the model is wrapped.

    Args:
        module: any; the names in its ``state_dict()`` stay. Arguments by name, and nested inputs and outputs, stay, too.
        offload_to_cpu: what is kept, the tensors among the inputs, waits for backward in the host's memory.

    Random numbers and autocast are the same when it is recomputed; running statistics of normalisation count a batch once.
    Raises ``TypeError`` for what is no module.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"checkpoint_wrapper() takes a module, such as nn.Sequential(...), and not {module!r}")
    module.forward = _Recomputed(module, module.forward, offload_to_cpu)
    return module


class _Recomputed:
    """The `forward` of `module`, checkpointed. An object, so that modules which have it are copied and pickled."""

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any], offload: bool) -> None:
        self._module, self._forward, self._offload = module, forward, offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and _switch.on):
            return self._forward(*args, **kwargs)
        # All tensors by position: checkpoint() looks at no others for devices, and lets hooks keep no others.
        leaves, shape = tree_flatten((args, kwargs))

        def run(*values: Any) -> Any:
            positional, named = tree_unflatten(list(values), shape)
            with _switched(True):  # as in forward: parts that are wrapped themselves have to keep as much now
                return self._forward(*positional, **named)

        with save_on_cpu() if self._offload else contextlib.nullcontext():
            return checkpoint(run, *leaves, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[Any, Any]:
        return contextlib.nullcontext(), _StatisticsApart(self._module)


class _StatisticsApart:
    """Inside, running statistics are copies: those of `module`, which backward may need as they are, stay.

    Entered again where backward runs again.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._before: list[tuple[torch.nn.Module, dict[str, torch.Tensor | None]]] = []

    def __enter__(self) -> None:
        for part in self._module.modules():
            if isinstance(part, _NormBase) and part.training:
                self._before.append((part, dict(part._buffers)))
                copies = {name: None if own is None else own.clone() for name, own in part._buffers.items()}
                part._buffers.update(copies)

    def __exit__(self, *_: object) -> None:
        while self._before:
            part, buffers = self._before.pop()
            part._buffers.update(buffers)
