"""How busy this machine's cores are, by the kernel's own count: whatever they do, moving bytes between hosts included."""

from __future__ import annotations

from pathlib import Path

__all__ = ["busy_share", "core_ticks", "of_stat"]

_STAT = Path("/proc/stat")
_IDLE = slice(3, 5)  # of its first line: idle, and idle while waiting for a disk
_COUNTED = 8  # what follows is counted in these already


def core_ticks() -> tuple[int, int] | None:
    """Ticks of all cores since the machine started, busy and in all; None where the kernel does not say."""
    try:
        return of_stat(_STAT.read_text())
    except OSError:
        return None


def of_stat(text: str) -> tuple[int, int]:
    """The same, from what the kernel says (pure)."""
    ticks = [int(word) for word in text.splitlines()[0].split()[1 : _COUNTED + 1]]
    return sum(ticks) - sum(ticks[_IDLE]), sum(ticks)


def busy_share(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """From 0 to 1, between two calls of :func:`core_ticks`; None where too little time passed to tell (pure)."""
    if before is None or after is None or after[1] == before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])
