"""Records forward, backward and step, for a timeline, through torch's global hooks.

forward    │ begins with the outermost module's call, ends with it; modules within it are spans of their own
backward   │ begins when the gradient of that module's output arrives, ends when autograd is through
step       │ from the first to the last step hook of an optimizer

Forward and backward of a micro-batch have its number: "forward 3".
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

__all__ = ["Phases", "micro_batch"]

#: Takes (name, category, started, ended) of something on the calling thread.
PhaseSpan = Callable[[str, str, float, float], None]


_micro_batch = ""  # that the stage of a pipeline works on, in this process


@contextmanager
def micro_batch(number: int) -> Iterator[None]:
    """A context in which phases are those of this micro-batch of a pipeline."""
    global _micro_batch
    before, _micro_batch = _micro_batch, f" {number}"
    try:
        yield
    finally:
        _micro_batch = before


class Phases:
    """The recorder, until :meth:`remove`; it tells `span` what lasted, and `step_begins` that an optimizer steps."""

    def __init__(self, span: PhaseSpan, step_begins: Callable[[], None]) -> None:
        self._span, self._announce_step = span, step_begins
        self._calls = threading.local()
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self._steps: dict[int, float] = {}
        self._backward_since: float | None = None
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # - Forward

    def _stack(self) -> list[tuple[torch.nn.Module, float]]:
        if not hasattr(self._calls, "stack"):
            self._calls.stack = []
        stack: list[tuple[torch.nn.Module, float]] = self._calls.stack
        return stack

    def _enter(self, module: torch.nn.Module, _inputs: Any) -> None:
        self._stack().append((module, time.monotonic()))

    def _leave(self, module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        stack = self._stack()
        if not any(entered is module for entered, _ in stack):
            return  # the timeline began inside this call
        while stack[-1][0] is not module:  # left without notice
            stack.pop()
        _, started = stack.pop()
        if stack:
            self._span(self._name(stack[0][0], module), "module", started, time.monotonic())
            return
        self._span(f"forward{_micro_batch}", "phase", started, time.monotonic())
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                value.register_hook(self._backward_begins)

    def _name(self, root: torch.nn.Module, module: torch.nn.Module) -> str:
        names = self._names.get(root)
        if names is None:
            names = self._names[root] = {id(part): name for name, part in root.named_modules()}
        return names.get(id(module)) or type(module).__name__

    # - Backward

    def _backward_begins(self, _gradient: torch.Tensor) -> None:
        if self._hooks and self._backward_since is None:
            self._backward_since = time.monotonic()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)  # type: ignore[attr-defined]

    def _backward_ends(self) -> None:
        if self._backward_since is not None:
            self._span(f"backward{_micro_batch}", "phase", self._backward_since, time.monotonic())
            self._backward_since = None

    # - Step

    def _step_begins(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._backward_since = None  # of a backward pass that raised
        self._announce_step()
        self._steps[id(optimizer)] = time.monotonic()

    def _step_ends(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        started = self._steps.pop(id(optimizer), None)
        if started is not None:
            self._span("step", "phase", started, time.monotonic())
