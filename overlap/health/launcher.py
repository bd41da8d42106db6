"""Watches for the end of torchrun's agent, which has started this process and would have to end it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["agent_gone", "line_to_agent"]

_OF_WORKERS = b"TORCHELASTIC_RUN_ID="  # in the environment of what torchrun starts

#: A process by its number, and when it began: numbers come again.
Process = tuple[int, int]


def agent_gone() -> Callable[[], str]:
    """A function that says that torchrun is gone, once it is; nothing where no torchrun has started this process."""
    line = line_to_agent()

    def gone() -> str:
        if all(_begin(number) == began for number, began in line):
            return ""
        return (
            f"torchrun (process {line[-1][0]}), which has started it, is gone, and nobody would end it with the others"
        )

    return gone


def line_to_agent() -> list[Process]:
    """The processes from this one's parent up to the agent, with scripts between them; empty where there is no agent.

    What torchrun starts has a variable of its own, which it has not itself. On Linux.
    """
    line: list[Process] = []
    number = os.getpid()
    while _is_of_workers(number):
        number = _parent(number)
        line.append((number, _begin(number)))
    return line if all(began for _, began in line) else []


def _is_of_workers(number: int) -> bool:
    try:
        return any(entry.startswith(_OF_WORKERS) for entry in Path(f"/proc/{number}/environ").read_bytes().split(b"\0"))
    except OSError:
        return False


def _stat(number: int) -> list[str]:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _parent(number: int) -> int:
    return int(stat[1]) if (stat := _stat(number)) else 0


def _begin(number: int) -> int:
    """In ticks of the host's clock; 0 where there is no such process, or one that has ended."""
    stat = _stat(number)
    return int(stat[19]) if stat and stat[0] not in "ZX" else 0
