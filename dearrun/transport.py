"""Checks comm_core's environment variables, which workers would refuse only once they have started (pure).

As in comm_core/csrc/settings.cpp: empty counts as not set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dearrun.errors import LaunchError

__all__ = ["RANGES", "check"]

#: The whole numbers that each may hold, from and to.
RANGES = {
    "COMM_CORE_SEGMENT_BYTES": (64, 1 << 30),
    "COMM_CORE_WINDOW": (1, 1024),
    "COMM_CORE_SMALL_BYTES": (0, 1 << 30),
    "COMM_CORE_IDLE_MS": (1, 1000),
    "COMM_CORE_EXIT_SECONDS": (1, 86400),
}


def check(environ: Mapping[str, str]) -> None:
    """Raise :class:`LaunchError` for what every worker would refuse, with the words in which it would."""
    for name, (low, high) in RANGES.items():
        text = environ.get(name, "")
        if text and not (re.fullmatch("-?[0-9]+", text) and low <= int(text) <= high):
            raise LaunchError(
                f"environment variable {name}={text}: expected an integer from {low} to {high}; correct or unset it"
            )
