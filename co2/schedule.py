"""Decides what follows a step: another local one, an average of all ranks, or a new round (pure).

Ranks agree by counting steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

__all__ = ["Event", "Schedule", "Standing", "StreamingSchedule"]


class Event(Enum):
    """What a rank does once it has stepped."""

    NOTHING = auto()  # the next step is local, too
    AVERAGE = auto()  # warm-up: wait for the average of all ranks and go on from there
    ROUND = auto()  # take over what the last round led to, and send this one's parameters


@dataclass(frozen=True)
class Standing:
    """How far a rank has come: what another needs to know to send the same rounds."""

    sent: int  # rounds and averages; loading a state does not change it
    event: Event  # what the last of them was
    rested: frozenset[int]  # slots that did not travel in it
    batches: tuple[tuple[int, ...], ...]  # of slots that were taken in together
    joined: bool = False  # it takes part in what others send, until they end


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

    def after(self, steps: int, in_round: int, turn: int = 0) -> Event:
        """What follows the step just made, from the number of `steps` so far and of those in the current round.

        `turn`: the number of that round since the last average.
        """
        if steps <= self.warmup:
            return Event.AVERAGE
        return Event.ROUND if in_round >= self.length(turn) else Event.NOTHING

    def length(self, turn: int) -> int:
        """The number of steps in a round."""
        return self.frequency

    @property
    def hiding(self) -> tuple[int, str]:
        """The number of steps that hide a round's exchange, and the option that sets it."""
        return self.frequency, self.option

    @property
    def most(self) -> int | None:
        """The largest number of steps that can hide an exchange; None: any."""
        return None


@dataclass(frozen=True)
class StreamingSchedule(Schedule):
    """A schedule that sends each of the `fragments` once every `frequency` steps, at even distances.

    What is sent is applied `overlap` steps later, at the latest just before the next fragment is sent: one is on its way at
    a time. Steps are counted from the last average of all parameters. Raises ``ValueError`` where they do not fit.
    """

    fragments: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fragments > self.frequency:
            raise ValueError(
                f"fragments={self.fragments} are sent one by one within outer_frequency={self.frequency} steps: there "
                "should be at most as many"
            )
        if self.overlap > self.frequency // self.fragments:
            raise ValueError(
                f"overlap_steps={self.overlap}: {self.fragments} fragments in outer_frequency={self.frequency} steps leave "
                f"{self.frequency // self.fragments} between two; take fewer fragments, or a larger outer_frequency"
            )

    def sent_after(self, turn: int) -> int:
        """The step after which that turn's fragment is sent; 0 for the turn before the first."""
        return (turn + 1) * self.frequency // self.fragments

    def length(self, turn: int) -> int:
        return self.sent_after(turn) - self.sent_after(turn - 1)

    def fragment(self, turn: int) -> int:
        """The fragment whose turn it is."""
        return turn % self.fragments

    @property
    def hiding(self) -> tuple[int, str]:
        return self.overlap, "overlap_steps"

    @property
    def most(self) -> int | None:
        return self.frequency // self.fragments
