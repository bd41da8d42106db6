"""Checks that a script calls ``perform_co2()`` after each step; a forgotten call would show only in the results."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["CallOrder", "follow_steps"]


class CallOrder:
    """The order of backward, ``optimizer.step()`` and ``perform_co2()`` in a script.

    Steps may be skipped, and passes repeated.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin anew, as between two steps: a state was loaded."""
        self._stepped: set[int] = set()  # optimizers that nobody has told of
        self._passes = 0  # since perform_co2()
        self._early = False  # perform_co2() was called after a pass, and before a step

    def passed(self) -> None:
        """Note that a backward pass has ended."""
        self._passes += 1
        self._early = False  # a GradScaler skipped the step

    def stepped(self, optimizer: int) -> None:
        """Note that the optimizer of that number has stepped.

        Raises ``RuntimeError`` where a call is missing, or came too early.
        """
        if self._early:
            self._early = False
            raise RuntimeError(
                "perform_co2() was called before optimizer.step(), so that a round is sent without its last step: call "
                "model.perform_co2(optimizer) after optimizer.step()"
            )
        if optimizer in self._stepped:
            self._stepped.clear()
            raise RuntimeError(
                "the optimizer has stepped twice, and perform_co2() was not called between: no round would end, and each "
                "rank would train a model of its own; call model.perform_co2(optimizer) after every optimizer.step()"
            )
        self._stepped.add(optimizer)

    def told(self) -> None:
        """Note that ``perform_co2()`` is called."""
        self._early = self._passes > 0 and not self._stepped
        self._stepped.clear()
        self._passes = 0


# Whose steps each is told of: those of optimizers with one of these parameters, by their ids, but for one optimizer.
_followed: weakref.WeakKeyDictionary[CallOrder, tuple[frozenset[int], int]] = weakref.WeakKeyDictionary()


def follow_steps(order: CallOrder, parameters: Collection[torch.nn.Parameter], *, but: torch.optim.Optimizer) -> None:
    """Tell `order`, while it lives, of the steps of all optimizers with one of `parameters`, except `but`.

    Or until another order follows these parameters.
    """
    _listen()
    mine = frozenset(id(param) for param in parameters)
    for other, (theirs, _) in list(_followed.items()):
        if not mine.isdisjoint(theirs):
            del _followed[other]
    _followed[order] = mine, id(but)


@functools.cache
def _listen() -> None:
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for order, (parameters, own) in list(_followed.items()):
        if id(optimizer) != own and any(
            id(p) in parameters for group in optimizer.param_groups for p in group["params"]
        ):
            order.stepped(id(optimizer))
