"""What a checkpoint of ``torch.distributed.checkpoint`` has, by its metadata, and which of it belongs to an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Entry", "Path", "by_parameter", "first_few", "groups_for", "merged_groups", "nest"]

Path = tuple[str | int, ...]  # of keys, from the outermost dictionary to a value; numbers are places in lists


class Entry(NamedTuple):
    """A value in a checkpoint. What is no tensor has neither shape nor dtype."""

    key: str
    path: Path
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None


def nest(items: Iterable[tuple[Path, Any]]) -> dict[str, Any]:
    """Dictionaries and lists that have these values at these paths, none of which is empty."""
    top: dict[Any, Any] = {}
    for path, value in items:
        inner = top
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return {key: _listed(value) for key, value in top.items()}


def _listed(value: Any) -> Any:
    if not isinstance(value, dict) or not value:
        return value
    inside = {key: _listed(each) for key, each in value.items()}
    return [inside[key] for key in sorted(inside)] if all(isinstance(key, int) for key in inside) else inside


def by_parameter(entries: Iterable[Entry], section: str, names: Iterable[str]) -> dict[str, list[tuple[Path, Entry]]]:
    """Those of a `section` ("state", "param_groups") of an optimizer that belong to parameters, by their name.

    Each with its path from there on. An optimizer's state dict may be nested, or flat (``flatten_optimizer_state_dict``).
    """
    known = set(names)
    found: dict[str, list[tuple[Path, Entry]]] = {}
    for entry in entries:
        inside = entry.path[1:]
        if inside[:1] == (section,):
            if len(inside) > 2 and inside[1] in known:
                found.setdefault(str(inside[1]), []).append((inside[2:], entry))
        elif len(inside) == 1 and str(inside[0]).startswith(f"{section}."):
            parts = str(inside[0]).split(".")[1:]
            for end in range(len(parts) - 1, 0, -1):  # a module may be named as the state of another is
                if (name := ".".join(parts[:end])) in known:
                    found.setdefault(name, []).append(((".".join(parts[end:]),), entry))
                    break
    return found


def groups_for(own: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The hyper-parameters for groups of parameters with these names, from `saved` groups, whose "params" are names.

    Raises ``ValueError`` where a parameter is in no saved group, and where parameters of one group have different
    hyper-parameters there.
    """
    place = {name: number for number, group in enumerate(saved) for name in group["params"]}
    missing = [name for names in own for name in names if name not in place]
    if missing:
        raise ValueError(f"the checkpoint has no hyper-parameters of {first_few(missing)}")
    found = []
    for names in own:
        numbers = sorted({place[name] for name in names})
        chosen = [_settings(saved[number]) for number in numbers]
        for other in chosen[1:]:
            if not _same(chosen[0], other):
                one, two = (next(name for name in names if place[name] == number) for number in numbers[:2])
                raise ValueError(
                    f"{one!r} and {two!r} are in one parameter group, and in the checkpoint in groups with different "
                    "hyper-parameters: group parameters as they were when it was saved"
                )
        found.append(chosen[0] if chosen else {})
    return found


def merged_groups(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The groups of a model of which each of `ranks` has some parameters, in some groups, whose "params" are names.

    A rank's group is part of that of lower ranks with the same hyper-parameters, of its own number if that is one; where
    there is none, it is one more.
    """
    found: list[dict[str, Any]] = []
    for groups in ranks:
        known = list(found)
        for number, group in enumerate(groups):
            alike = [place for place, each in enumerate(known) if _same(_settings(each), _settings(group))]
            if alike:
                home = known[number if number in alike else alike[0]]
            else:
                home = {**group, "params": []}
                found.append(home)
            names = list(dict.fromkeys((*home["params"], *group["params"])))
            home.update({key: names for key in ("params", "param_names") if key in home})
    return found


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


def first_few(names: Sequence[str]) -> str:
    """Some of the `names`, for a message, and how many there are."""
    shown = ", ".join(repr(name) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
