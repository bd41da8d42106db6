"""What follows a step: nothing, an average of all ranks, or a new round (pure). Ranks agree by counting steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

__all__ = ["Event", "Schedule"]


class Event(Enum):
    """What a rank does once it has stepped."""

    NOTHING = auto()  # the next step is local, too
    AVERAGE = auto()  # warm-up: wait for the average of all ranks and go on from there
    ROUND = auto()  # take over what the last round led to, and send this one's parameters


@dataclass(frozen=True)
class Schedule:
    """Rounds of `frequency` steps, after `warmup` steps that are averaged one by one.

    `option`: what users call `frequency`. Raises ``ValueError`` for counts that are none.
    """

    frequency: int
    warmup: int = 0
    option: str = field(default="outer_frequency", compare=False)

    def __post_init__(self) -> None:
        for name, value, least in ((self.option, self.frequency, 1), ("warmup_steps", self.warmup, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} should be a number of steps, at least {least}, and is {value!r}")

    def after(self, steps: int, in_round: int) -> Event:
        """Of `steps` since the beginning, `in_round` belong to the current round; both count the step just made."""
        if steps <= self.warmup:
            return Event.AVERAGE
        return Event.ROUND if in_round >= self.frequency else Event.NOTHING
