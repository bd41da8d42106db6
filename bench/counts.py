"""Numbers on a command line that count something."""

from __future__ import annotations

import argparse
from collections.abc import Callable

__all__ = ["at_least"]


def at_least(least: int) -> Callable[[str], int]:
    """What argparse reads an option with that counts from `least`; anything else is an error with status 2."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"should be a whole number of at least {least} and is {text}")
        return value

    return read
