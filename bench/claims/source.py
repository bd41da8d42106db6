"""A source in a page: which file of ``docs/results`` it means, and which runs in it (reads files, else pure)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.methods.spec import family_of
from bench.sweep.ratios import Ratio
from bench.sweep.report import BUSY_MARK, BUSY_NOTE
from bench.sweep.summary import GROUP, Group, group
from bench.train.cores import was_busy

__all__ = ["Source", "table", "with_interval"]

_NOTES = {"*": "\\* with changes that were not committed.", BUSY_MARK: BUSY_NOTE}


@dataclass(frozen=True)
class Source:
    """A source, taken apart: the files it may read, its words after the view, and settings and options by name.

    `read` are the files that it has read, in the folder. Where it is not `strict`, a sentence may speak of runs that tables
    mark, and `marks` are theirs.
    """

    folder: Path
    words: tuple[str, ...]
    named: Mapping[str, str]
    strict: bool = True
    read: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)

    def quiet(self, found: Mapping[str, Any]) -> None:
        """As :meth:`mark`, where others used the machine of what was `found`."""
        if was_busy(found):
            self.mark(BUSY_MARK)

    def mark(self, marks: str) -> None:
        """Raises ``ValueError`` for runs with such marks, which a sentence has no room for, where that is strict."""
        if self.strict:
            raise ValueError(
                "a sentence does not speak of runs whose code was not committed, or whose machine others used; "
                "a table marks them"
            )
        self.marks.append(marks)

    def raw(self, name: str) -> dict[str, Any]:
        """The results in a file. Raises ``OSError`` where there is none."""
        found: dict[str, Any] = json.loads((self.folder / name).read_text())
        self.read.append(name)
        return found

    def methods(self) -> list[str]:
        """The families of methods that the words after the file name."""
        return [family_of(word) for word in self.words[1:]]

    def option(self, name: str) -> str:
        if name not in self.named:
            raise ValueError(f"{name}= is missing")
        return self.named[name]

    def sweep(self) -> dict[str, Any]:
        return self.raw(f"{self.words[0]}/reports.json")

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


def with_interval(ratio: Ratio) -> Ratio:
    """The same. Raises ``ValueError`` for one without an interval: pages have none of these."""
    if ratio.interval is None:
        raise ValueError(f"a ratio in a page has an interval, which takes six runs of both sides, not {ratio.n}")
    return ratio


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    notes = [note for mark, note in _NOTES.items() if mark in text.replace("**", "")]
    return "\n\n".join([text, *notes])
