"""Describes what ranks wait for in a reader's terms, since operations are issued under short labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["Awaited", "Explained", "Meaning", "in_words"]

Meaning = Callable[[str, str], str]
"""What a label means on the communicator of this name; empty: nothing more than it says."""


class Awaited(Protocol):
    """Something that is not finished, such as a `Work`."""

    @property
    def seconds(self) -> float:
        """The seconds for which it has been waited for."""

    def describe(self) -> str:
        """A description in one line."""


class Explained:
    """`work`, issued on the communicator of name `channel`, with what its label means there."""

    def __init__(self, work: Awaited, channel: str, meaning: Meaning) -> None:
        self._work, self._channel, self._meaning = work, channel, meaning

    @property
    def seconds(self) -> float:
        return self._work.seconds

    def done(self) -> bool:
        return bool(getattr(self._work, "done", bool)())

    def describe(self) -> str:
        label = str(getattr(self._work, "label", ""))
        meaning = self._meaning(self._channel, label)
        return f"{self._work.describe()} [{label}: {meaning}]" if meaning else self._work.describe()


def in_words(parameters: Sequence[str], step: int) -> str:
    """A bucket as text, for whoever has written the model: two of its `parameters`, and the current step (pure)."""
    more = f" and {len(parameters) - 2} more" if len(parameters) > 2 else ""
    return f"{', '.join(parameters[:2])}{more}, step {step}"
