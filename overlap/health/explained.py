"""Something that ranks wait for, as whoever reads a report is told of it: operations are issued under short labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["Awaited", "Explained", "Meaning", "in_words"]

Meaning = Callable[[str, str], str]
"""What a label means on the communicator of this name; empty: nothing more than it says."""


class Awaited(Protocol):
    """One thing that is not finished; a `Work` is one."""

    @property
    def seconds(self) -> float:
        """For how long it has not been."""

    def describe(self) -> str:
        """What it is, in one line."""


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
    """What a bucket is to whoever has written the model: two of its `parameters`, and the step that is made (pure)."""
    more = f" and {len(parameters) - 2} more" if len(parameters) > 2 else ""
    return f"{', '.join(parameters[:2])}{more}, step {step}"
