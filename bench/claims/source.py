"""A source in a page: which file of ``docs/results`` it means, and which runs in it (reads files, else pure)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.methods.spec import family_of
from bench.sweep.summary import GROUP, Group, group

__all__ = ["Source", "table"]

_NOTE = "\\* with changes that were not committed."


@dataclass(frozen=True)
class Source:
    """A source, taken apart: the files it may read, its words after the view, and settings and options by name."""

    folder: Path
    words: tuple[str, ...]
    named: Mapping[str, str]

    def methods(self) -> list[str]:
        """The families of methods that the words after the file name."""
        return [family_of(word) for word in self.words[1:]]

    def option(self, name: str) -> str:
        if name not in self.named:
            raise ValueError(f"{name}= is missing")
        return self.named[name]

    def sweep(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads((self.folder / self.words[0] / "reports.json").read_text())
        return data

    def groups(self) -> list[Group]:
        """The groups of the sweep that have all the settings named. Raises ``ValueError`` where there are none."""
        where = {name: value for name, value in self.named.items() if name in GROUP}
        found = [
            one
            for one in group(self.sweep()["runs"])
            if all(str(one.settings[name]) == value for name, value in where.items())
        ]
        if not found:
            raise ValueError(f"{self.words[0]} has no runs with {where}")
        return found

    def one_group(self) -> Group:
        groups = self.groups()
        if len(groups) > 1:
            raise ValueError(
                f"{len(groups)} groups of runs are meant, not one: {'; '.join(one.title for one in groups)}"
            )
        return groups[0]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"{text}\n\n{_NOTE}" if "*" in text.replace("**", "") else text
