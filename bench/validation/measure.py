"""Measures, once, what has to be known before cells run; then the cells themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.methods.method import MethodUnavailable
from bench.sweep.failures import Failures
from bench.sweep.journal import Journal, key
from bench.sweep.runner import attempt, name_of, run_all
from bench.train.cores import look
from bench.train.origin import Origin
from bench.train.settings import Settings
from bench.validation import known, probe
from bench.validation.facts import Facts, Unknown

__all__ = ["Runs", "Workshop"]

_TRIES = 3


class Runs:
    """The results of runs, kept in `folder`; those of another `origin` count only where they are to `keep`.

    `busy`: runs are made, and marked, although others use the machine. Else that raises :class:`bench.train.cores.Busy`.
    """

    def __init__(self, folder: Path, origin: Origin, *, keep: bool = False, busy: bool = False) -> None:
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.journal = Journal(folder / "results.jsonl", origin, keep=keep)
        self._failures = Failures(folder / "failures.jsonl")
        self._look = partial(look, allowed=busy)

    def measure(self, settings: Settings) -> Mapping[str, Any] | None:
        """The result of a run, which is made unless it is there; None where it fails."""
        if self.journal.get(settings) is None:
            run_all([settings], self.journal, self._failures, self.logs, _TRIES, attempt, self._look)
        return self.journal.get(settings)

    def reason(self, settings: Settings) -> str:
        """Why a run has no result."""
        return self._failures.of([settings], self.journal)[0].reason


class Workshop:
    """Measures :class:`bench.validation.facts.Facts`, and keeps in `folder` what they are made of.

    `keep`: what was measured with other code counts, too. `busy`: as of :class:`Runs`.
    """

    def __init__(self, folder: Path, origin: Origin, *, keep: bool = False, busy: bool = False) -> None:
        self.facts = Facts(os.cpu_count() or 1)
        self._runs = Runs(folder, origin, keep=keep, busy=busy)
        self._probes, self._profiles = folder / "probes", folder / "profiles"
        for place in (self._probes, self._profiles):
            place.mkdir(parents=True, exist_ok=True)
        self._origin, self._keep = origin, keep

    def measure(self, cell: Settings) -> None:
        """Measure what the prediction of a cell needs, and nothing of the cell. Raises :class:`Unknown`."""
        for run in known.needed(cell):
            result = self._runs.measure(run)
            if result is None:
                raise Unknown(f"{name_of(run)} has no result: {self._runs.reason(run)}")
            self.facts.runs[key(run.to_dict())] = result
        if cell.emulate_compute is None:
            self._profile(cell)
        self._probe(cell)

    def _probe(self, cell: Settings) -> None:
        kind, hosts, rate = known.probe_of(cell)
        name = known.named(kind, hosts, rate)
        if name in self.facts.probes:
            return
        path = self._probes / f"{name}.json"
        found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        if found is None or not (self._keep or found["origin"] == self._origin.to_dict()):
            try:
                found = {**probe.measure(kind, hosts, rate), "origin": self._origin.to_dict()}
            except (MethodUnavailable, *probe.FAILS) as error:
                raise Unknown(f"the probe {name} failed: {error}") from error
            path.write_text(json.dumps(found))
        self.facts.probes[name] = found

    def _profile(self, cell: Settings) -> None:
        run = known.profiled(cell)
        name = name_of(run)
        path = self._profiles / f"{name}.json"
        stamp = path.with_suffix(".origin")
        there = stamp.exists() and (self._keep or stamp.read_text() == str(self._origin))
        if not there:
            _, reason, _ = attempt(run, self._runs.logs / f"profile-{name}.log", ["--profile", str(path)])
            if reason:
                raise Unknown(f"the layers of {cell.model} could not be measured: {reason}")
            stamp.write_text(str(self._origin))
        self.facts.profiles[name] = path.read_text()
