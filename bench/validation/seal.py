"""Seals predictions in a file before the cells that they are of run, and recomputes them.

    facts ──▶ predictions ──▶ sealed.json, committed ──▶ runs ──▶ report
                              SHA-256 of all of them

The file has everything that the predictions were computed from, so that anybody can compute them again.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.sweep.journal import key
from bench.train.origin import Origin
from bench.train.settings import Settings
from bench.validation.facts import Facts, Unknown, predict

__all__ = ["Commitment", "Seal", "SealError", "commitment", "predicted", "read", "write"]


class SealError(RuntimeError):
    """There is no seal that runs could be held to; the message says why, and what to do."""


@dataclass(frozen=True)
class Seal:
    """The predictions of a `table` (its text), with the `facts` they follow from and the `origin` of the code.

    `predictions`: seconds of each cell's step, or why there are none.
    """

    table: str
    origin: Origin
    facts: Facts
    predictions: tuple[tuple[Settings, float | str], ...]

    def of(self, cell: Settings) -> float | str:
        """The prediction of a cell, or why there is none."""
        found = {key(settings.to_dict()): value for settings, value in self.predictions}
        return found.get(key(cell.to_dict()), "its prediction is not among those that were sealed")

    def recomputed(self) -> list[Settings]:
        """The cells of which another prediction follows, by this code, from the same facts."""
        seconds = [(cell, value) for cell, value in self.predictions if not isinstance(value, str)]
        return [cell for cell, value in seconds if predicted(cell, self.facts) != value]

    def to_dict(self) -> dict[str, Any]:
        facts = self.facts
        return {
            "table": self.table,
            "origin": self.origin.to_dict(),
            "cores": facts.cores,
            "runs": [facts.runs[name] for name in sorted(facts.runs)],
            "probes": facts.probes,
            "profiles": facts.profiles,
            "predictions": [
                {"settings": cell.to_dict(), **({"reason": value} if isinstance(value, str) else {"seconds": value})}
                for cell, value in self.predictions
            ],
        }

    @property
    def sha256(self) -> str:
        return hashlib.sha256(_canonical(self.to_dict())).hexdigest()


def _canonical(data: Any) -> bytes:
    """The one text of some data as JSON: keys in order, a line each."""
    return (json.dumps(data, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def predicted(cell: Settings, facts: Facts) -> float | str:
    """A cell's prediction, or why there is none."""
    try:
        return predict(cell, facts)
    except (Unknown, ValueError) as error:
        return str(error)


def write(seal: Seal, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_canonical({"sealed": seal.to_dict(), "sha256": seal.sha256}))


def read(path: Path) -> Seal:
    """The seal in a file. Raises :class:`SealError` where there is none, or its contents have another hash than it says."""
    try:
        whole = json.loads(path.read_bytes())
        told, sealed = whole["sha256"], whole["sealed"]
        facts = Facts(
            sealed["cores"],
            {key(result["settings"]): result for result in sealed["runs"]},
            sealed["probes"],
            sealed["profiles"],
        )
        several = (
            (each, each["seconds"] if "seconds" in each else str(each["reason"])) for each in sealed["predictions"]
        )
        predictions = tuple((Settings(**each["settings"]), value) for each, value in several)
        seal = Seal(sealed["table"], Origin(**sealed["origin"]), facts, predictions)
    except OSError:
        raise SealError(f"there is no {path}: seal predictions first, with --seal, and commit the file") from None
    except (ValueError, KeyError, TypeError) as error:
        raise SealError(f"{path} holds no sealed predictions: {type(error).__name__}: {error}") from None
    found = hashlib.sha256(_canonical(sealed)).hexdigest()
    if found != told:
        raise SealError(f"{path} says that its SHA-256 is {told}, and it is {found}: it was changed; seal anew")
    return seal


@dataclass(frozen=True)
class Commitment:
    """The commit that a sealed file is in, and when that was made."""

    commit: str
    at: datetime

    def __str__(self) -> str:
        return f"{self.commit[:10]} of {self.at:%Y-%m-%d %H:%M} UTC"


def commitment(path: Path, now: datetime | None = None) -> Commitment:
    """The last commit of a file in the history of HEAD.

    Raises :class:`SealError` unless the file is what that commit has, and the commit is older than `now`.
    """
    folder, name = path.resolve().parent, path.name
    told = _git(folder, "log", "-1", "--format=%H %ct", "--", name).decode().split()
    if not told:
        raise SealError(f"{path} is in no commit before HEAD: commit it before anything is run")
    commit, at = told[0], datetime.fromtimestamp(int(told[1]), timezone.utc)
    if _git(folder, "show", f"{commit}:./{name}") != path.read_bytes():
        raise SealError(
            f"{path} is not what commit {commit[:10]} has: commit it, or check it out, before anything is run"
        )
    if at > (now or datetime.now(timezone.utc)):
        raise SealError(
            f"commit {commit[:10]} of {path} is of {at:%Y-%m-%d %H:%M} UTC, which is yet to come: set the clock"
        )
    return Commitment(commit, at)


def _git(folder: Path, *words: str) -> bytes:
    try:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise SealError("git is not installed, and it tells whether predictions are older than runs") from None
    except subprocess.CalledProcessError as error:
        raise SealError(f"git {words[0]}: {error.stderr.decode(errors='replace').strip()}") from None
