"""What a sweep has finished, one JSON line a run: it survives being killed, and failures never enter it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.settings import Settings

__all__ = ["Journal", "key"]


def key(settings: Mapping[str, Any]) -> str:
    """The same for the same run: 10 is 10.0, as a table says one and a result the other. Its time limit does not count."""
    told = {name: float(value) if type(value) is int else value for name, value in settings.items()}
    return json.dumps({name: value for name, value in told.items() if name != "timeout"}, sort_keys=True)


class Journal:
    """Results by settings, kept in a file. A line that was cut off when the sweep was killed is forgotten."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._results: dict[str, dict[str, Any]] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            try:
                result = json.loads(line)
            except json.JSONDecodeError:
                continue
            self._results[key(result["settings"])] = result
        if len(self._results) != len(lines):
            path.write_text("".join(json.dumps(result) + "\n" for result in self._results.values()))

    def get(self, settings: Settings) -> dict[str, Any] | None:
        return self._results.get(key(settings.to_dict()))

    def add(self, result: dict[str, Any]) -> None:
        self._results[key(result["settings"])] = result
        with self._path.open("a") as file:
            file.write(json.dumps(result) + "\n")
