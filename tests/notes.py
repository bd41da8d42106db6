"""In which test each rank of a job is: one file a rank, read where a job has ended and no rank said why.

A rank that a signal ends says nothing, and neither does one that computes in C without letting Python's other threads run.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Note", "erase", "first", "killed", "overdue", "read", "write"]


@dataclass(frozen=True)
class Note:
    """That a rank has begun a test: the one with this number in the order of the suite."""

    number: int
    pid: int
    limit: float  # of that test, in seconds, after which its rank says so and ends; 0: none
    begun: float  # as time.time()
    test: str


def write(folder: str, rank: int, number: int, limit: float, test: str) -> None:
    """Replace this rank's note at once: who reads it meanwhile finds the old one."""
    path = os.path.join(folder, str(rank))
    with open(f"{path}.new", "w") as file:
        file.write(f"{number} {os.environ.get('DEAR_TESTS_PID', os.getpid())} {limit} {time.time()} {test}")
    os.replace(f"{path}.new", path)


def erase(folder: str, rank: int) -> None:
    """This rank is in no test any more."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, str(rank)))


def read(folder: Path) -> list[Note]:
    """The notes of all ranks that are in a test, or ended in one."""
    notes = []
    for path in folder.iterdir():
        if path.suffix == ".new":
            continue
        with contextlib.suppress(FileNotFoundError):  # erased meanwhile
            number, pid, limit, begun, test = path.read_text().split(" ", 4)
            notes.append(Note(int(number), int(pid), float(limit), float(begun), test))
    return notes


def overdue(notes: Sequence[Note], now: float, patience: float) -> bool:
    """Whether a rank has been in a test for longer than its limit, and `patience` seconds more, without ending (pure)."""
    return any(note.limit and now > note.begun + note.limit + patience for note in notes)


def killed(notes: Sequence[Note], output: str) -> str:
    """The test of the rank of which the launcher says, by the number of its process, that it was first to die (pure)."""
    by_pid = {note.pid: note.test for note in notes}
    said = (int(pid) for pid in re.findall(r"\bpid:? (\d+)\b", output, re.IGNORECASE))
    return next((by_pid[pid] for pid in said if pid in by_pid), "")


def first(notes: Sequence[Note]) -> str:
    """The first test, in the suite's order, in which a rank is (pure): others have gone on until they missed that rank."""
    return min(notes, key=lambda note: note.number).test if notes else ""
