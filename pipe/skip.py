"""Skip connections between layers of a ``Sequential`` that do not follow each other, also across stages (torchgpipe, 3.3).

@skippable(stash=["early"])                       @skippable(pop=["early"])
class First(nn.Module):                           class Last(nn.Module):
    def forward(self, x):                             def forward(self, x):
        yield stash("early", x)                           early = yield pop("early")
        return self.layer(x)                              return self.layer(x) + early

In one process, a tensor goes straight to the stage that pops it, through no stage between. Across ranks, see
`pipe.carried`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

__all__ = ["Key", "Namespace", "Skippable", "holding", "pop", "skippable", "stash", "verify_skippables"]

_Made = TypeVar("_Made", bound="Skippable")


class Namespace:
    """Tells skip connections of the same name apart; see :meth:`Skippable.isolate`."""

    __slots__ = ()

    def __copy__(self) -> Namespace:
        return self

    def __deepcopy__(self, memo: Any) -> Namespace:
        return self


#: A skip connection: its namespace, None where it has none, and its name.
Key = tuple[Namespace | None, str]


class stash(NamedTuple):
    """What a ``forward()`` yields to leave `tensor`, or None, for the layer that pops `name`."""

    name: str
    tensor: torch.Tensor | None


class pop(NamedTuple):
    """What a ``forward()`` yields to get the tensor that was stashed as `name`."""

    name: str


class _Local(threading.local):
    def __init__(self) -> None:
        self.store: dict[Key, torch.Tensor | None] = {}


_local = _Local()


@contextmanager
def holding(popped: Mapping[Key, torch.Tensor | None]) -> Iterator[dict[Key, torch.Tensor | None]]:
    """A context in which layers find what is `popped`, and leave what they stash in the dictionary that it gives."""
    before, _local.store = _local.store, dict(popped)
    try:
        yield _local.store
    finally:
        _local.store = before


class Skippable(torch.nn.Module):
    """The base of what :func:`skippable` makes: a layer whose ``forward()`` is a generator that stashes and pops."""

    made_of: type[torch.nn.Module]
    stashes: frozenset[str] = frozenset()
    pops: frozenset[str] = frozenset()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        self.module = self.made_of(*args, **options)
        self.namespaces: dict[str, Namespace] = {}

    def isolate(self: _Made, namespace: Namespace, *, only: Iterable[str] | None = None) -> _Made:
        """Let the names of this layer, or `only` these, be those of `namespace`; returns the layer."""
        for name in self.stashes | self.pops if only is None else only:
            if name in self.namespaces:
                raise ValueError(f"{name!r} is in a namespace already")
            self.namespaces[name] = namespace
        return self

    def keys(self, names: Iterable[str]) -> list[Key]:
        """The skip connections with these `names`."""
        return [(self.namespaces.get(name), name) for name in sorted(names)]

    def forward(self, input: Any) -> Any:
        running = self.module(input)
        if not isinstance(running, Generator):
            if self.stashes or self.pops:
                raise TypeError(f"{self.made_of.__name__}.forward() should yield {self._told()}, and returned")
            return running
        left, answer, store = set(self.stashes | self.pops), None, _local.store
        while True:
            try:
                asked = running.send(answer)
            except StopIteration as over:
                if left:
                    name = self.made_of.__name__
                    raise RuntimeError(f"{name}.forward() is over, and has not yielded {sorted(left)}") from None
                return over.value
            answer = None
            declared = self.stashes if isinstance(asked, stash) else self.pops if isinstance(asked, pop) else ()
            if not isinstance(asked, stash | pop) or asked.name not in declared:
                raise RuntimeError(f"{self.made_of.__name__}.forward() yielded {asked}, and declares {self._told()}")
            left.discard(asked.name)
            key = self.namespaces.get(asked.name), asked.name
            if isinstance(asked, stash):
                store[key] = asked.tensor
            elif key in store:
                answer = store.pop(key)
            else:
                raise RuntimeError(f"{asked.name!r} is popped, and nothing was stashed under it before")

    def _told(self) -> str:
        return f"stash={sorted(self.stashes)}, pop={sorted(self.pops)}"


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[torch.nn.Module]], type[Skippable]]:
    """A decorator of a module's class whose ``forward()`` yields each of these names once: see above."""

    def decorate(made_of: type[torch.nn.Module]) -> type[Skippable]:
        names = {
            "made_of": made_of,
            "stashes": frozenset(stash),
            "pops": frozenset(pop),
            "__doc__": made_of.__doc__,
            "__module__": made_of.__module__,
        }
        return type(made_of.__name__, (Skippable,), names)

    return decorate


def verify_skippables(module: torch.nn.Sequential) -> None:
    """Raise ``TypeError`` unless each layer pops what one before it has stashed, and all that is stashed is popped once."""
    wrong = []
    open_: dict[Key, str] = {}
    for name, layer in module.named_children():
        for part in layer.modules():
            if not isinstance(part, Skippable):
                continue
            wrong += [
                f"layer {name!r} pops {key[1]!r}, which no layer before has stashed"
                for key in part.keys(part.pops)
                if open_.pop(key, None) is None
            ]
            for key in part.keys(part.stashes):
                if key in open_:
                    wrong.append(f"layer {name!r} stashes {key[1]!r}, as layer {open_[key]!r} has")
                open_[key] = name
    wrong += [f"layer {name!r} stashes {key[1]!r}, which no layer pops" for key, name in open_.items()]
    if wrong:
        raise TypeError(f"skip connections do not fit: {'; '.join(wrong)}")
