"""Parameters looked up in ``optimizer.param_groups`` are awaited like those that a module hands out."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from overlap.transit import Transit

__all__ = ["GroupGates", "ListedParameters", "listed"]


class ListedParameters(list[torch.nn.Parameter]):
    """A group's parameters, final when they are handed out one by one or in a row. Copies and pickles are plain lists."""

    def __init__(self, plain: list[torch.nn.Parameter], touch: Callable[[], None]) -> None:
        super().__init__(plain)
        self._touch = touch

    def __iter__(self) -> Iterator[torch.nn.Parameter]:
        self._touch()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self._touch()
        return super().__getitem__(index)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(listed(self)),)


def listed(params: list[torch.nn.Parameter]) -> Iterator[torch.nn.Parameter]:
    """The parameters of a group, for those who do not look at their values."""
    return list.__iter__(params)


class GroupGates:
    """Sets :class:`ListedParameters` into the groups of `optimizer`, which wait for `transit`, and takes them out again."""

    def __init__(self, optimizer: torch.optim.Optimizer, transit: Transit) -> None:
        self._optimizer, self._transit = optimizer, weakref.ref(transit)
        self._aside: int | None = None  # a thread that does not look at values
        self.guard()

    def guard(self) -> None:
        """Also those groups that were added since."""
        for group in self._optimizer.param_groups:
            if not isinstance(group["params"], ListedParameters):
                group["params"] = ListedParameters(group["params"], self._touch)

    def remove(self) -> None:
        for group in self._optimizer.param_groups:
            if isinstance(group["params"], ListedParameters):
                group["params"] = list(listed(group["params"]))

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, this thread goes through groups without looking at values."""
        self._aside = threading.get_ident()
        try:
            yield
        finally:
            self._aside = None

    def _touch(self) -> None:
        transit = self._transit()
        if transit and self._aside != threading.get_ident():
            transit.arrive_all()
