"""Shared by all benchmark programs: the project's folder, count options, files, what links sent, and an orderly end."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "at_least", "end_in_order", "from_toml", "sent_bytes", "write_json"]

ROOT = Path(__file__).resolve().parent.parent


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type for counts from `least`; anything else is an error with status 2."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"should be a whole number of at least {least} and is {text}")
        return value

    return read


def from_toml(path: Path) -> dict[str, Any]:
    """The contents of a TOML file. Raises ``OSError``, and ``ValueError`` where it is none."""
    # Python 3.10 has no tomllib; requirements.txt names the package it was made from.
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    found: dict[str, Any] = toml.loads(path.read_text())
    return found


def write_json(path: Path, found: Any) -> None:
    """Write `found` to `path`, whose folder is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def sent_bytes(counters: Path = Path("/proc/net/dev")) -> int:
    """What this host's links have sent so far, by the kernel's counters; the loopback is none."""
    rows = [line.split(":") for line in counters.read_text().splitlines()[2:]]
    return sum(int(counts.split()[8]) for name, counts in rows if name.strip() != "lo")


def end_in_order() -> None:
    """Have SIGTERM, and a closed terminal's SIGHUP, raise ``SystemExit`` from now on. Of the main thread.

    Emulated hosts and workers are removed then. A program started by nohup goes on ignoring SIGHUP.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda received, _frame: sys.exit(128 + received))
