"""Keeps results of tuning in a JSON file, for the same model on as many ranks over the same network.

Read and written by rank 0 alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from overlap.plan.cost_model import CostModel
from overlap.plan.tuning.campaign import Result
from overlap.plan.tuning.space import Setting

__all__ = ["Place", "load", "save", "signature"]

_FORMAT = 1
_SAME = 1.5  # networks whose all-reduce of the model differs by a smaller factor are the same one, measured twice


@dataclass(frozen=True, slots=True)
class Place:
    """The circumstances that a result holds for."""

    strategy: str
    model: str  # signature()
    nbytes: int  # of all its gradients
    ranks: int
    hosts: int
    backend: str
    link: CostModel

    def like(self, other: Place) -> bool:
        """Whether the circumstances are the same, apart from noise in the network's measurement."""
        mine, theirs = self.link.seconds(self.nbytes), other.link.seconds(other.nbytes)
        return self._fixed() == other._fixed() and mine <= _SAME * theirs and theirs <= _SAME * mine

    def _fixed(self) -> tuple[str | int, ...]:
        return self.strategy, self.model, self.nbytes, self.ranks, self.hosts, self.backend


def signature(parameters: Iterable[str]) -> str:
    """A hash of a model, from one line for each of its parameters."""
    return hashlib.sha256("\n".join(parameters).encode()).hexdigest()[:16]


def load(path: Path, place: Place) -> dict[str, float] | None:
    """The setting that was found for `place`; None if there is none, or no file.

    Raises ``ValueError`` for a file that :func:`save` did not write, ``OSError`` for one that cannot be read.
    """
    for entry in _read(path):
        if _place(entry).like(place):
            return dict(entry["setting"])
    return None


def save(path: Path, place: Place, result: Result) -> None:
    """Add `result`, in the stead of an older one for the same place; a reader sees the old file or the new one.

    Raises as :func:`load` does.
    """
    kept = [entry for entry in _read(path) if not _place(entry).like(place)]
    entry = {"place": asdict(place), **asdict(result)}
    text = json.dumps({"format": _FORMAT, "results": [*kept, entry]}, indent=1)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text + "\n")
    temporary.replace(path)


def _place(entry: dict[str, Any]) -> Place:
    fields = entry["place"]
    return Place(**{**fields, "link": CostModel(**fields["link"])})


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']}")
        entries: list[dict[str, Any]] = content["results"]
        for entry in entries:
            _place(entry)
            _check(entry["setting"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} holds no results of tuning in format {_FORMAT} ({error!r}); move it away or name another file"
        ) from None
    return entries


def _check(setting: Setting) -> None:
    if not all(isinstance(name, str) and isinstance(value, int | float) for name, value in setting.items()):
        raise ValueError(f"setting {setting}")
