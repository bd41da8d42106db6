"""Calls a function when a backward pass through a model has ended, with all gradients accumulated.

Passes may be nested: a checkpoint with ``use_reentrant=True`` runs one inside. The end that counts is the outermost's,
to which the gradients of the model's outputs belong. Where those are not seen (a script calls a submodule, or the output is
no structure that torch knows), each pass that accumulates has an end: an average of averages is the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["BackwardEnd"]


class BackwardEnd:
    """Calls the method `then`, while its object lives, once after each pass that has reached one of `parameters`.

    Made after what else listens to them. What a parameter holds does not hold the model's wrapper: the garbage collector
    cannot see through a parameter's hooks.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], then: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._then, self._left = then, parameters  # those that are not watched yet
        self.forget()
        self.watch()

    def forget(self) -> None:
        """Forget a pass that has begun, since a pass that raised has no end. Outside of any pass."""
        self._asked = -1  # the pass whose end is asked for
        self._outermost = False  # it is known to be, and others are inside
        self._reached = False

    def watch(self, output: Any = None) -> None:
        """Listen also to parameters that were frozen until now, and to the model's `output`."""
        left = []
        for param in self._left:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._accumulated)
            else:
                left.append(param)
        self._left = left
        if torch._C._current_graph_task_id() < 0:
            self.forget()
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                value.register_hook(self._began)

    def _began(self, _gradient: torch.Tensor) -> None:
        if not self._outermost:
            self._outermost = True
            self._ask()

    def _accumulated(self, _param: torch.Tensor) -> None:
        self._reached = True
        if not self._outermost and self._asked != torch._C._current_graph_task_id():
            self._ask()

    def _ask(self) -> None:
        self._asked = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(self._ended)  # type: ignore[attr-defined]

    def _ended(self) -> None:
        then, reached = self._then(), self._reached
        self.forget()
        if then is not None and reached:
            then()
