"""Keeps, beside the journal, why runs have no result, by the reasons in their logs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from bench.sweep.journal import Journal, key
from bench.train.origin import origin_of
from bench.train.settings import Settings

__all__ = ["Failure", "Failures", "reason_in"]

_REASON = re.compile(r"bench\.train: |\b[\w.]*(Error|Exception|Unavailable|Interrupt): ")
_THAT_IT_FAILED = re.compile(r"a worker failed|exited with -?\d+|ChildFailedError")  # a launcher's words, not why


@dataclass(frozen=True)
class Failure:
    """A run without a result: the reason, and how often it was tried, 0 times if it never began."""

    settings: Settings
    reason: str
    tries: int


def reason_in(text: str) -> str:
    """The first line of a log that says why a run failed; later lines are consequences."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if _REASON.search(line) and not _THAT_IT_FAILED.search(line)]
    at_least = [line for line in lines if re.search(r"error|bench\.train:|failed", line, re.IGNORECASE)]
    return (telling[:1] or at_least[-1:] or lines[-1:] or ["it said nothing"])[0][:300]


class Failures:
    """The last failure of every run that has not succeeded since. They keep no run from being tried again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, tuple[str, int]] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                told = json.loads(line)
                self._note(key(told["settings"]), str(told["reason"]), int(told["tries"]))
            except (ValueError, KeyError, TypeError):
                continue  # cut off when the sweep was killed

    def _note(self, name: str, reason: str, tries: int) -> None:
        if tries:
            self._known[name] = (reason, tries)
        else:
            self._known.pop(name, None)

    def _write(self, failure: Failure) -> None:
        settings = failure.settings.to_dict()
        self._note(key(settings), failure.reason, failure.tries)
        text = self._path.read_text() if self._path.exists() else ""
        with self._path.open("a") as file:
            line = json.dumps({"settings": settings, "reason": failure.reason, "tries": failure.tries})
            file.write(("\n" if text and not text.endswith("\n") else "") + line + "\n")

    def add(self, failure: Failure) -> None:
        self._write(failure)

    def succeeded(self, run: Settings) -> None:
        if key(run.to_dict()) in self._known:
            self._write(Failure(run, "", 0))

    def of(self, runs: Iterable[Settings], journal: Journal) -> list[Failure]:
        """A failure for each of `runs` that has no result, or has failed since it had one.

        A run that was never tried is none where another of its settings has a result: few are run as often as the fastest.
        """
        runs = list(runs)
        found, measured = [], {replace(run, repeat=0) for run in runs if journal.get(run) is not None}
        for run in runs:
            result = journal.get(run)
            reason, tries = self._known.get(key(run.to_dict()), ("it has not been run", 0))
            if result is None and (tries or replace(run, repeat=0) not in measured):
                found.append(Failure(run, reason, tries))
            elif result is not None and tries:
                found.append(Failure(run, f"{reason}; the result above is older, of {origin_of(result)}", tries))
        return found
