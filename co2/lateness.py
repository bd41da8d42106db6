"""Whether rounds are hidden behind the steps they belong to; said once where they are not."""

from __future__ import annotations

import logging

__all__ = ["Lateness"]

log = logging.getLogger("dear")

_WORTH_SAYING = 0.05  # of a round's time


class Lateness:
    """Of the rounds of `frequency` steps that one rank sends. `option`: what its user calls that number."""

    def __init__(self, rank: int, frequency: int, option: str) -> None:
        self._rank, self._frequency, self._option = rank, frequency, option
        self._said = False

    def note(self, waited: float, took: float) -> None:
        """A step waited so many seconds for the average of a round whose own steps took `took`."""
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
