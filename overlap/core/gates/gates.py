"""Gates in front of parameters: who reads one through its module waits until its value has arrived.

    step() ── all-gathers issued ──▶ returns          forward, state_dict(), parameters(), deepcopy, …
                                                       └─ touch the gate ─▶ wait for that parameter's bucket only

A gate stands where every reader passes: in the dictionary from which ``module.weight`` and ``module.parameters()`` are
served, and in a pre-forward hook for modules that keep references of their own (``nn.LSTM``'s flat weights). Compiled
code passes neither; it waits in its guards (``compiled.py``).

Parameters looked up in ``optimizer.param_groups`` are awaited like those that a module hands out.
"""

from __future__ import annotations

import copy
import copyreg
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from overlap.core.gates.compiled import GUARDS, Entry, untraced
from overlap.core.gathering import Transit

__all__ = ["GatedParameters", "Gates", "GroupGates", "ListedParameters", "Ours", "Touch", "listed"]


Touch = Callable[[torch.nn.Parameter], None]
Swap = Callable[["GatedParameters", str, torch.nn.Parameter], None]


class GatedParameters(dict[str, "torch.nn.Parameter | None"]):
    """A module's parameter dictionary that calls `touches` before it hands a parameter out.

    `entries` hold the same for compiled code; `swaps` hear when another parameter takes the name of one, `copies` before
    one is copied or pickled. Copies are plain dictionaries and pickles ordered ones: they belong to another module, or
    another process.
    """

    def __init__(self, plain: dict[str, torch.nn.Parameter | None]) -> None:
        super().__init__(plain)
        self.touches: tuple[Touch, ...] = ()
        self.entries: tuple[Entry, ...] = ()
        self.swaps: tuple[Swap, ...] = ()
        self.copies: tuple[Touch, ...] = ()

    def _pass(self, value: Any) -> Any:
        if GUARDS and torch.compiler.is_dynamo_compiling():
            for entry in self.entries:
                entry.await_module()
        elif value is not None:
            for touch in self.touches:
                touch(value)
        return value

    def __setitem__(self, name: str, value: torch.nn.Parameter | None) -> None:
        old = super().get(name)
        if old is not None and old is not value:
            for swap in self.swaps:
                swap(self, name, old)
        super().__setitem__(name, value)

    def __getitem__(self, name: str) -> torch.nn.Parameter | None:
        return self._pass(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._pass(super().get(name, default))

    def items(self) -> Any:
        self._pass_all()
        return super().items()

    def values(self) -> Any:
        self._pass_all()
        return super().values()

    def __iter__(self) -> Iterator[str]:  # without it, dict(gated) would copy past __getitem__
        return iter(super().keys())

    def copy(self) -> dict[str, torch.nn.Parameter | None]:
        return dict(self.items())

    def __copy__(self) -> dict[str, torch.nn.Parameter | None]:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, torch.nn.Parameter | None]:
        self._copied()
        return {name: copy.deepcopy(value, memo) for name, value in self.items()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._copied()
        return OrderedDict(self.items()).__reduce_ex__(2)  # torch.load(weights_only=True) refuses the name `dict`

    def _copied(self) -> None:
        for value in super().values():
            if value is not None:
                for told in self.copies:
                    told(value)

    def _pass_all(self) -> None:
        for value in super().values():
            self._pass(value)


class Ours:
    """What :func:`_reduced` leaves out of a module's dictionaries of hooks."""


def _reduced(hooks: OrderedDict[Any, Any]) -> Any:
    """What copies and pickles of `hooks` are made from: the copy's parameters are nobody's business.

    A module has to keep the dictionaries that it was made with, since the handles of other hooks refer to them.
    """
    theirs = hooks
    if any(isinstance(value, Ours) for value in hooks.values()):
        theirs = OrderedDict((key, value) for key, value in hooks.items() if not isinstance(value, Ours))
    return theirs.__reduce_ex__(2)


class _Hook(Ours):
    def __init__(self, call: Callable[..., Any], entry: Entry | None = None) -> None:
        self._call = call
        self._entry = entry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (GUARDS and torch.compiler.is_dynamo_compiling()):
            return self._call(*args, **kwargs)
        if self._entry is not None:
            self._entry.await_module()
        return None


class Gates:
    """The gates of one optimizer over a set of modules, and their removal.

    `touch(parameter)` is called before a parameter is handed out, `enter(module)` and `leave(module)` around each
    forward; around each call of compiled code that contains the module's forward, both come first. Several optimizers
    may hold gates on one module. `copied(parameter)` comes before it is copied or pickled with its module, and may refuse.
    """

    def __init__(
        self,
        touch: Touch,
        enter: Callable[..., None],
        leave: Callable[..., None],
        copied: Touch = lambda _parameter: None,
    ) -> None:
        self._copied = copied
        self._touch, self._enter, self._leave = untraced(touch), untraced(enter), untraced(leave)
        # One key for all modules: compiled code of one is used for others of its class, which have the same keys.
        self._before, self._after = (RemovableHandle(OrderedDict()).id for _ in range(2))
        self._modules: dict[torch.nn.Module, Entry] = {}
        self.swapped: list[tuple[GatedParameters, str, torch.nn.Parameter]] = []  # whose name another one has taken
        copyreg.pickle(OrderedDict, _reduced)

    def guard(self, modules: Iterable[torch.nn.Module], managed: Callable[[Any], bool]) -> None:
        """Set gates on each module not guarded yet; `managed` tells the parameters of this optimizer from others."""
        for module in modules:
            if module in self._modules:
                continue
            entry = self._modules[module] = Entry(module, self._enter, self._leave)
            hooks: Any = module._forward_pre_hooks
            hooks[self._before] = _Hook(self._enter, entry)
            hooks.move_to_end(self._before, last=False)
            module._forward_hooks[self._after] = _Hook(self._leave)
            module._forward_hooks_always_called[self._after] = Ours()  # type: ignore[assignment]  # the key counts
            if any(managed(parameter) for parameter in module._parameters.values()):
                gated = module._parameters
                if not isinstance(gated, GatedParameters):
                    gated = module.__dict__["_parameters"] = GatedParameters(gated)
                gated.touches += (self._touch,)
                gated.entries += (entry,)
                gated.swaps += (self._swap,)
                gated.copies += (self._copied,)

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules that have gates."""
        return list(self._modules)

    def any_in(self, module: torch.nn.Module) -> bool:
        """Whether `module`, or one inside of it, has gates."""
        return any(each in self._modules for each in module.modules())

    def _swap(self, gated: GatedParameters, name: str, old: torch.nn.Parameter) -> None:
        self.swapped.append((gated, name, old))

    def remove(self) -> None:
        for module, entry in self._modules.items():
            module._forward_pre_hooks.pop(self._before, None)
            for hooks in (module._forward_hooks, module._forward_hooks_always_called):
                hooks.pop(self._after, None)
            parameters = module._parameters
            if isinstance(parameters, GatedParameters):
                parameters.touches = tuple(touch for touch in parameters.touches if touch != self._touch)
                parameters.entries = tuple(other for other in parameters.entries if other is not entry)
                parameters.swaps = tuple(swap for swap in parameters.swaps if swap != self._swap)
                parameters.copies = tuple(told for told in parameters.copies if told != self._copied)
                if not parameters.touches:
                    module.__dict__["_parameters"] = dict(parameters)
        self._modules.clear()


class ListedParameters(list[torch.nn.Parameter]):
    """The parameters of a group as a list that waits: they are final when they are handed out.

    Copies, sums and pickles are plain lists.
    """

    def __init__(self, plain: list[torch.nn.Parameter], touch: Callable[[], None]) -> None:
        super().__init__(plain)
        self._touch = touch

    def __iter__(self) -> Iterator[torch.nn.Parameter]:
        self._touch()
        return super().__iter__()

    def __reversed__(self) -> Iterator[torch.nn.Parameter]:
        self._touch()
        return super().__reversed__()

    def __getitem__(self, index: Any) -> Any:
        self._touch()
        return super().__getitem__(index)

    def __add__(self, other: Any) -> Any:
        return self.copy() + other

    def __radd__(self, other: Any) -> Any:
        return other + self.copy()

    def copy(self) -> list[torch.nn.Parameter]:
        return list(self)

    def pop(self, index: Any = -1) -> torch.nn.Parameter:
        self._touch()
        return super().pop(index)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(listed(self)),)


def listed(params: list[torch.nn.Parameter]) -> Iterator[torch.nn.Parameter]:
    """The parameters of a group without waiting, for code that does not read their values."""
    return list.__iter__(params)


class GroupGates:
    """Replaces the parameter lists of `optimizer`'s groups by :class:`ListedParameters`, which wait for `transit`."""

    def __init__(self, optimizer: torch.optim.Optimizer, transit: Transit) -> None:
        self._optimizer, self._transit = optimizer, weakref.ref(transit)
        self._aside: int | None = None  # a thread that does not look at values
        self.guard()

    def guard(self) -> None:
        """Replace the lists, also of groups that were added since."""
        for group in self._optimizer.param_groups:
            if not isinstance(group["params"], ListedParameters):
                group["params"] = ListedParameters(group["params"], self._touch)

    def remove(self) -> None:
        for group in self._optimizer.param_groups:
            if isinstance(group["params"], ListedParameters):
                group["params"] = list(listed(group["params"]))

    @contextmanager
    def open(self) -> Iterator[None]:
        """A context in which this thread goes through groups without waiting, since it reads no values."""
        self._aside = threading.get_ident()
        try:
            yield
        finally:
            self._aside = None

    def _touch(self) -> None:
        transit = self._transit()
        if transit is not None and transit.busy and self._aside != threading.get_ident():
            transit.arrive_all()
