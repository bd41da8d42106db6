"""Warns, once, where the communication of a round takes longer than the steps that should hide it."""

from __future__ import annotations

import logging

__all__ = ["Lateness"]

log = logging.getLogger("dear")

_WORTH_SAYING = 0.05  # of a round's time


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
