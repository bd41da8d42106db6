"""Runs an optimizer's ``step()`` in parts, and lets what it writes besides parameters and state count once.

    step() of the script │ part: as before the step ─▶ the optimizer's own step() ─▶ note what it wrote, put it back
                         │ part …                                                              the same again
                         │ at the end: what was noted counts

Only for optimizers of types that we do not know: those of torch write nothing there. A part has some parameters of each
group; a group that has none gets one without elements and gradient, so that what ``step()`` counts in it is counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from overlap.core.frozen import Frozen, freeze, same, thaw
from overlap.core.silence import Communicates, listening, silent

__all__ = ["Once", "named", "unhooked_step", "watched", "writable", "written"]

#: Where a value is: in a group, by its number and key; an attribute; or in the state, under a key that is no parameter.
Place = tuple[str, int, Any]

_OWN = frozenset({"state", "param_groups"})


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """``type(optimizer).step`` without torch's profiling and step hooks, which run once, around the whole step."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


class Once:
    """Runs the steps of `optimizer`, whose type we do not know, in parts."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._step = optimizer, unhooked_step(optimizer)
        self._before: dict[Place, Frozen] = {}  # as it was when this step began
        self._written: dict[Place, Frozen | None] = {}  # None: deleted
        self._failure = ""
        self.first = True  # until the first step is over

    def part(self, state: MutableMapping[Any, Any], chosen: Mapping[int, Sequence[torch.nn.Parameter]]) -> None:
        """Update the parameters `chosen` of each group, whose state is in `state`."""
        if not self._before:
            self._before = writable(self._optimizer)
        if self._failure:
            return
        with _in_parts(self._optimizer, state, chosen):
            try:
                with silent(torchs=self.first):
                    self._step(self._optimizer)
            except Communicates as operation:
                self._failure = (
                    f"{type(self._optimizer).__name__}.step() calls {operation}, an operation between ranks, and each rank "
                    f"calls it for its own parameters only: {_REMEDY}"
                )
        self._note(written(self._before, writable(self._optimizer)))

    def _note(self, found: Mapping[Place, Frozen | None]) -> None:
        for place, value in found.items():
            known = self._written.setdefault(place, value)
            if known is not value and not _alike(known, value):
                self._failure = self._failure or self._depends(named(place), _shown(known), _shown(value))
        _write(self._optimizer, {place: self._before.get(place) for place in found})

    def _depends(self, what: str, one: str, other: str) -> str:
        return (
            f"{type(self._optimizer).__name__}.step() was called for some parameters at a time, and {what} came out as "
            f"{one} and as {other}: it depends on which parameters these are. {_REMEDY}"
        )

    def settle(self, share: Callable[[Any], Sequence[Any]]) -> str:
        """End the script's step: what its parts have written counts. Returns what went wrong, or nothing.

        In the first step on every rank, which `share` their objects: what goes wrong on one has done so on all.
        """
        if not self._before:  # this rank had nothing to update
            self.part(self._optimizer.state, {})
        if self.first:
            texts = {named(place): _shown(value) for place, value in self._written.items() if _is_plain(value)}
            self._compare(share((self._failure, texts)))
            self.first = False
        _write(self._optimizer, self._written)
        self._before, self._written = {}, {}
        failure, self._failure = self._failure, ""
        return failure

    def _compare(self, told: Sequence[tuple[str, dict[str, str]]]) -> None:
        known: dict[str, str] = {}
        failures = [failure for failure, _ in told if failure]
        for _, texts in told:
            for what, text in texts.items():
                if known.setdefault(what, text) != text:
                    failures.append(self._depends(what, known[what], text))
        self._failure = self._failure or next(iter(failures), "")


_REMEDY = (
    "leave elementwise=True or per_parameter=True out, and every rank updates all parameters (under ShardedDataParallel "
    "take oss.DistributedOptimizer instead)"
)


def watched(optimizer: torch.optim.Optimizer, step: Callable[..., Any], tell: Callable[[bool], None]) -> Any:
    """`step`, which updates all parameters of `optimizer`; it reports whether that wrote something or communicated."""

    def updated(*arguments: Any) -> Any:
        before = writable(optimizer)
        with listening() as operations:
            result = step(*arguments)
        tell(bool(operations) or bool(written(before, writable(optimizer))))
        return result

    return updated


@contextmanager
def _in_parts(
    optimizer: torch.optim.Optimizer,
    state: MutableMapping[Any, Any],
    chosen: Mapping[int, Sequence[torch.nn.Parameter]],
) -> Iterator[None]:
    """Inside, `optimizer` has those parameters, their state, and no hooks; but for these it is itself."""
    whole, groups = optimizer.state, optimizer.param_groups
    kept = [(group, group["params"]) for group in groups]
    hooks = {name: value for name, value in vars(optimizer).items() if name.startswith("_optimizer_")}
    stand_ins = []
    for number, (group, params) in enumerate(kept):
        group["params"] = list(chosen.get(number, ()))
        if not group["params"]:
            like = next(list.__iter__(params), None)  # not iter(params), which waits for values
            stand_ins.append(torch.nn.Parameter(torch.empty(0) if like is None else like.detach().new_empty(0)))
            group["params"].append(stand_ins[-1])
    if state is not whole:
        state.update((key, value) for key, value in whole.items() if not isinstance(key, torch.Tensor))
        optimizer.state = state  # type: ignore[assignment]
    vars(optimizer).update((name, OrderedDict()) for name, value in hooks.items() if isinstance(value, OrderedDict))
    try:
        yield
    finally:
        vars(optimizer).update(hooks)
        for group, params in kept:
            group["params"] = params
        optimizer.state = whole
        for param in stand_ins:
            state.pop(param, None)
        if state is not whole:
            shared = [key for key in state if not isinstance(key, torch.Tensor)]
            for key in [key for key in whole if not isinstance(key, torch.Tensor) and key not in state]:
                del whole[key]
            whole.update((key, state.pop(key)) for key in shared)


# - What a step may write


def writable(optimizer: torch.optim.Optimizer) -> dict[Place, Frozen]:
    """A snapshot of all that a step may write besides parameters and their state."""
    found: dict[Place, Frozen] = {}
    for number, group in enumerate(optimizer.param_groups):
        found.update((("group", number, key), freeze(value)) for key, value in group.items() if key != "params")
    for name, value in vars(optimizer).items():
        if name not in _OWN and not name.startswith("_optimizer_"):
            found["attribute", 0, name] = freeze(value)
    for key, value in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            found["state", 0, key] = freeze(value)
    return found


def written(before: Mapping[Place, Frozen], after: Mapping[Place, Frozen]) -> dict[Place, Frozen | None]:
    """The differences between two snapshots, with None for what is gone `after` (pure)."""
    found: dict[Place, Frozen | None] = {
        place: value for place, value in after.items() if place not in before or not same(before[place], value)
    }
    found.update((place, None) for place in before if place not in after)
    return found


def named(place: Place) -> str:
    kind, number, key = place
    if kind == "group":
        return f"{key!r} of parameter group {number}"
    return f"its attribute {key!r}" if kind == "attribute" else f"{key!r} of its state"


def _alike(one: Frozen | None, other: Frozen | None) -> bool:
    return one is other if one is None or other is None else same(one, other)


def _shown(value: Frozen | None) -> str:
    return "nothing" if value is None else repr(_plain(value))[:80]


def _is_plain(value: Frozen | None) -> bool:
    """Whether it reads the same in every process."""
    if value is None or isinstance(value.inside, torch.Tensor):
        return True
    if value.inside is None:
        return isinstance(value.value, bool | int | float | complex | str | bytes | None)
    inside = value.inside.values() if isinstance(value.inside, dict) else value.inside
    return isinstance(value.inside, dict | list) and all(map(_is_plain, inside))


def _plain(frozen: Frozen) -> Any:
    inside = frozen.inside
    if isinstance(inside, dict):
        return {key: _plain(item) for key, item in inside.items()}
    if isinstance(inside, list):
        return [_plain(item) for item in inside]
    return frozen.value if inside is None else inside


def _write(optimizer: torch.optim.Optimizer, values: Mapping[Place, Frozen | None]) -> None:
    for (kind, number, key), value in values.items():
        owner: Any = vars(optimizer) if kind == "attribute" else optimizer.state
        if kind == "group":
            owner = optimizer.param_groups[number]
        if value is None:
            owner.pop(key, None)
        else:
            owner[key] = thaw(value)
