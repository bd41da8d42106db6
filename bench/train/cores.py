"""Measures how busy this machine's cores are, by the kernel's own count of all that they do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "BUSY",
    "STOLEN",
    "Busy",
    "Ticks",
    "busy_share",
    "core_ticks",
    "look",
    "of_stat",
    "others_share",
    "stolen_share",
    "told",
    "was_busy",
    "worst",
]

BUSY = 0.1  # of all cores: from here on what others compute is no noise any more
STOLEN = 0.05  # of all cores' time: from here on other guests of the same host decide how long a step takes
_WINDOW_SECONDS = 2.0
_WINDOWS = 10  # what ran before may still be ending

_SHARES = ("busy_before", "cores_busy", "cores_stolen")  # of cores, by their names in results

_STAT = Path("/proc/stat")
_IDLE = slice(3, 5)  # of its first line: idle, and idle while waiting for a disk
_STOLEN = 7  # a virtual machine had something to run, and its host ran something else
_COUNTED = 8  # what follows is counted in these already


class Busy(RuntimeError):
    """Other processes use the machine on which something should be measured."""


class Ticks(NamedTuple):
    """Ticks of all cores since the machine started: `busy`, with those that were `stolen`, and in `all`."""

    busy: int
    all: int
    stolen: int


def core_ticks() -> Ticks | None:
    """The ticks of all cores until now; None where the kernel does not say."""
    try:
        return of_stat(_STAT.read_text())
    except OSError:
        return None


def of_stat(text: str) -> Ticks:
    """The ticks in the text of /proc/stat (pure)."""
    ticks = [int(word) for word in text.splitlines()[0].split()[1 : _COUNTED + 1]]
    return Ticks(sum(ticks) - sum(ticks[_IDLE]), sum(ticks), ticks[_STOLEN])


def busy_share(before: Ticks | None, after: Ticks | None) -> float | None:
    """The busy share of cores, 0 to 1, between two :func:`core_ticks`; None where too little time passed (pure)."""
    if before is None or after is None or after.all == before.all:
        return None
    return (after.busy - before.busy) / (after.all - before.all)


def stolen_share(before: Ticks | None, after: Ticks | None) -> float | None:
    """The share of cores, 0 to 1, that a virtual machine wanted and its host gave to others; as :func:`busy_share`."""
    if before is None or after is None or after.all == before.all:
        return None
    return (after.stolen - before.stolen) / (after.all - before.all)


def others_share() -> float | None:
    """The share of all cores that others keep busy, in two seconds in which this process sleeps."""
    before = core_ticks()
    time.sleep(_WINDOW_SECONDS)
    return busy_share(before, core_ticks())


def look(*, allowed: bool, share: Callable[[], float | None] = others_share) -> float | None:
    """The share of cores that others keep busy before a run begins, for its raw data; None where the kernel does not say.

    Waits a while for the machine to become quiet. Raises :class:`Busy` where it does not, unless that is `allowed`: then
    the share, of :data:`BUSY` or more, marks the run.
    """
    for _ in range(1 if allowed else _WINDOWS):
        found = share()
        if found is None or found < BUSY:
            return found
    if allowed:
        return found
    raise Busy(
        f"other processes keep {found:.0%} of this machine's {os.cpu_count()} cores busy, and a measurement takes less "
        f"than {BUSY:.0%}: end them, or measure all the same with --busy, which marks the result"
    )


def told(during: float | None, before: float | None, stolen: float | None = None) -> str:
    """How busy the machine was while a run was measured, and before it began, in a few words."""
    shares = ["unknown" if share is None else f"{share:.0%}" for share in (during, before)]
    taken = f", {stolen:.0%} taken by other guests of the host" if (stolen or 0.0) >= STOLEN else ""
    return f"cores busy {shares[0]}, {shares[1]} before it began{taken}"


def worst(runs: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The largest of each share that these results tell, by its name; None where one of them does not know it (pure)."""
    shares = {name: [run[name] for run in runs] for name in _SHARES if name in runs[0]}
    return {name: None if None in found else max(found) for name, found in shares.items()}


def was_busy(found: Mapping[str, Any]) -> bool:
    """Whether others used the machine before a run began that has this result, or its host gave the cores to others.

    Of an older result nobody knows.
    """
    return (found.get("busy_before") or 0.0) >= BUSY or (found.get("cores_stolen") or 0.0) >= STOLEN
