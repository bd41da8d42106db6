"""When a place in the script is passed: what the parts of a step take is told by such stamps.

A host that launches is far ahead of its device, so its own clock shows how long launches take. What a device passes is
stamped in its streams: `overlap.transport.cuda.stamps`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from overlap.transport.work import Work

__all__ = ["Stamp", "Stamps"]

#: What :meth:`Stamps.now` gives, to be read later.
Stamp = Any


class Stamps:
    """Moments, all on one scale: seconds of ``time.perf_counter``. These are of a host that computes itself."""

    #: Whether computations are launched only, so that what the host does beside them takes no time of theirs.
    launched = False

    def now(self) -> Stamp:
        """Here, in what the calling thread does or has a device do."""
        return time.perf_counter()

    def over(self, work: Work, lane: object) -> Stamp | None:
        """When `work`, just issued, will be over; None where its own ``seconds`` say it. Lanes run beside each other."""
        return None

    def reader(self) -> Callable[[Stamp], float]:
        """What gives a stamp's seconds. Waits until all stamps that were made are passed."""
        return float
