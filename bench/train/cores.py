"""Measures how busy this machine's cores are, by the kernel's own count of all that they do."""

from __future__ import annotations

from pathlib import Path

__all__ = ["busy_share", "core_ticks", "of_stat"]

_STAT = Path("/proc/stat")
_IDLE = slice(3, 5)  # of its first line: idle, and idle while waiting for a disk
_COUNTED = 8  # what follows is counted in these already


def core_ticks() -> tuple[int, int] | None:
    """The ticks of all cores since the machine started, busy and in all; None where the kernel does not say."""
    try:
        return of_stat(_STAT.read_text())
    except OSError:
        return None


def of_stat(text: str) -> tuple[int, int]:
    """The ticks in the text of /proc/stat (pure)."""
    ticks = [int(word) for word in text.splitlines()[0].split()[1 : _COUNTED + 1]]
    return sum(ticks) - sum(ticks[_IDLE]), sum(ticks)


def busy_share(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """The busy share of cores, 0 to 1, between two :func:`core_ticks`; None where too little time passed (pure)."""
    if before is None or after is None or after[1] == before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])
