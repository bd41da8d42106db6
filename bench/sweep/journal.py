"""The results of a sweep, one JSON line a run; it survives being killed, and contains no failures.

One sweep at a time works in a folder of results.
"""

from __future__ import annotations

import fcntl
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.train.origin import Origin, origin_of
from bench.train.settings import Settings

__all__ = ["Journal", "Occupied", "alone", "key"]


def key(settings: Mapping[str, Any]) -> str:
    """A key that is the same for the same run: 10 is 10.0, as a table says one and a result the other.

    Its time limit does not count. A result that tells no number is the first of its kind.
    """
    all_told = {"repeat": 0, **settings}
    told = {name: float(value) if type(value) is int else value for name, value in all_told.items()}
    return json.dumps({name: value for name, value in told.items() if name != "timeout"}, sort_keys=True)


class Journal:
    """Results by settings and origin, kept in a file. A line that was cut off when the sweep was killed is forgotten.

    Those of another origin than `wanted` stay in the file and do not count, unless `keep`: then the last one counts where
    there is none of `wanted`. What is added counts.
    """

    def __init__(self, path: Path, wanted: Origin, *, keep: bool = False) -> None:
        self._path = path
        self._all: dict[tuple[str, str], dict[str, Any]] = {}
        self._counted: dict[str, dict[str, Any]] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            try:
                result = json.loads(line)
                self._all[key(result["settings"]), str(origin_of(result))] = result
            except (json.JSONDecodeError, KeyError, TypeError):
                continue
        self._untidy = len(self._all) != len(lines)
        exact = [result for result in self._all.values() if origin_of(result) == wanted]
        for result in [*self._all.values(), *exact] if keep else exact:
            self._counted[key(result["settings"])] = result

    def get(self, settings: Settings) -> dict[str, Any] | None:
        return self._counted.get(key(settings.to_dict()))

    def seconds(self, settings: Settings) -> float | None:
        """The median step of a run; None where there is no result that counts."""
        found = self.get(settings)
        return None if found is None else statistics.median(found["step_seconds"])

    def others(self, runs: Iterable[Settings]) -> int:
        """The number of `runs` that have results of another origin only."""
        known = {settings for settings, _ in self._all}
        return len({key(run.to_dict()) for run in runs} & known - self._counted.keys())

    def add(self, result: dict[str, Any]) -> None:
        name = key(result["settings"])
        self._counted[name] = self._all[name, str(origin_of(result))] = result
        if self._untidy:
            self._write()
            return
        with self._path.open("a") as file:
            file.write(json.dumps(result) + "\n")

    def forget(self, runs: Iterable[Settings], backup: Path) -> int:
        """Drop all results of `runs`, of any origin, after adding them to the file `backup`; returns how many."""
        names = {key(run.to_dict()) for run in runs}
        dropped = {both: result for both, result in self._all.items() if both[0] in names}
        if dropped:
            with backup.open("a") as file:
                file.writelines(json.dumps(result) + "\n" for result in dropped.values())
            self._all = {both: result for both, result in self._all.items() if both not in dropped}
            self._counted = {name: result for name, result in self._counted.items() if name not in names}
            self._write()
        return len(dropped)

    def _write(self) -> None:
        whole = self._path.with_suffix(".new")
        whole.write_text("".join(json.dumps(result) + "\n" for result in self._all.values()))
        whole.replace(self._path)
        self._untidy = False


class Occupied(RuntimeError):
    """Another sweep uses the folder."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A context that locks `folder`; raises :class:`Occupied` where another process holds it.

    The kernel ends the lock with the last process that holds it: this one, and a run that was forked from it.
    """
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Occupied(f"another sweep is running in {folder}; wait for it, or choose another --output") from None
        yield
