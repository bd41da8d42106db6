"""What rank 0 knows about an operation that some ranks have asked for and others not."""

from __future__ import annotations

import time
from collections.abc import Sequence

from overlap.horovod.controller.coordinator import Waiting

__all__ = ["Stalled"]


class Stalled:
    """Names the ranks that are missing; looks like a `Work` to the watchdog."""

    def __init__(self, waiting: Waiting, missing: Sequence[int]) -> None:
        self._since, self._title = waiting.since, waiting.title
        self._asked, self._missing = sorted(waiting.requests), list(missing)

    @property
    def seconds(self) -> float:
        """Time since the first rank asked for it."""
        return time.monotonic() - self._since

    def describe(self) -> str:
        return f"{self._title} (asked for by ranks {self._asked}, missing: ranks {self._missing})"
