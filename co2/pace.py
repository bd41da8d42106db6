"""Measures how long a local step and the exchange of all parameters take, and tells whether a round hides the latter.

Warns, once, where the communication of a round takes longer than the steps that should hide it.

An exchange is measured from when every rank has come to it: who waits for a slow rank waits with any number of steps.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import defaultdict, deque

__all__ = ["ENOUGH", "Lateness", "Pace", "explained", "hiding"]

ENOUGH = 3  # rounds, from which on a median says something
_KEPT = 9
_WORTH_SAYING = 0.05  # of a round's time

log = logging.getLogger("dear")


class Pace:
    """The seconds of one rank's last local steps and exchanges."""

    def __init__(self) -> None:
        self._steps = deque[float](maxlen=_KEPT)
        self._exchanges = defaultdict[int, deque[float]](lambda: deque(maxlen=_KEPT))

    def stepped(self, seconds: float) -> None:
        """Note that a step took so many seconds, on average over a round."""
        self._steps.append(seconds)

    def exchanged(self, seconds: float, what: int) -> None:
        """Note that the exchange of `what`, one of those that rounds carry in turn, took so many seconds."""
        self._exchanges[what].append(seconds)

    @property
    def rounds(self) -> int:
        """The number of rounds of which both times are known."""
        return min(len(self._steps), sum(map(len, self._exchanges.values())))

    @property
    def step(self) -> float:
        """The median seconds of a step; needs a round."""
        return statistics.median(self._steps)

    @property
    def exchange(self) -> float:
        """The median seconds of the longest exchange; needs a round."""
        return max(statistics.median(seconds) for seconds in self._exchanges.values())


class Lateness:
    """The warning of one rank about rounds of `frequency` steps. `option`: what its user calls that number."""

    def __init__(self, rank: int, frequency: int, option: str) -> None:
        self._rank, self._frequency, self._option = rank, frequency, option
        self._said = False

    def note(self, waited: float, took: float) -> None:
        """Note that a step waited so many seconds for the average of a round whose own steps took `took`."""
        if self._said or waited <= _WORTH_SAYING * took:
            return
        self._said = True
        log.warning(
            "co2: rank %d waited %.3g s for the average of a round whose %d step(s) took %.3g s: the network, or "
            "another rank, is slower than that; a larger %s hides it (this is said once)",
            self._rank,
            waited,
            self._frequency,
            took,
            self._option,
        )


def hiding(step: float, exchange: float) -> int:
    """The smallest number of steps that take as long as the exchange (pure)."""
    return max(1, math.ceil(exchange / step)) if step > 0 else 1


def explained(
    ranks: int,
    steps: int,
    step: float,
    exchange: float,
    nbytes: int,
    option: str = "outer_frequency",
    carried_by: str = "a reduce-scatter and an all-gather",
    most: int | None = None,
) -> str:
    """A sentence that says whether `steps`, an option called `option`, hide the exchange of `nbytes` (pure).

    There can be at `most` so many.
    """
    needed = hiding(step, exchange)
    if steps >= needed:
        hidden = f"yes: {steps} steps take {1e3 * steps * step:,.4g} ms, and {needed} would do"
    elif most is not None and needed > most:
        hidden = f"no: {needed} steps would, and {most} fit between two; a larger outer_frequency makes room for them"
    else:
        hidden = f"no: {steps} steps take {1e3 * steps * step:,.4g} ms; {option}={needed} hides it"
    lines = {
        "step": f"{1e3 * step:,.4g} ms",
        "exchange": f"{1e3 * exchange:,.4g} ms: {carried_by} of {nbytes / 2**20:,.4g} MB",
        "hidden": hidden,
    }
    return "\n".join(
        [f"co2 on {ranks} ranks, as measured here", *(f"  {name:<8}  {line}" for name, line in lines.items())]
    )
