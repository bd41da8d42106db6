"""How one rank learns the others' shares of the outer state, though they may not have come to its event yet."""

from __future__ import annotations

import time
from collections.abc import Sequence

from co2.part import Shares
from overlap.transport.peer_queries import Mailroom, NoAnswer

__all__ = ["Inquiry"]

_ANSWER_SECONDS = 600.0
_AGAIN_SECONDS = 0.01


class Inquiry:
    """Asks `others` on `topic`. Who answers None is asked again: no mailroom waits for its rank's main thread."""

    def __init__(self, mailroom: Mailroom, topic: str, others: Sequence[int]) -> None:
        self._mailroom, self._topic, self._others = mailroom, topic, list(others)

    def ask(self, events: int) -> list[Shares]:
        """Their shares after so many events. Raises :class:`NoAnswer` if one does not come."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        found: list[Shares] = []
        missing = self._others
        while missing:
            asked = [(rank, self._mailroom.ask(rank, self._topic, events)) for rank in missing]
            left = max(deadline - time.monotonic(), 0.0)
            answers = {rank: Mailroom.wait(answer, rank, self._topic, left) for rank, answer in asked}
            found += [share for share in answers.values() if share is not None]
            missing = [rank for rank, share in answers.items() if share is None]
            if missing:
                if left == 0:
                    raise NoAnswer(f"ranks {missing} did not come to event {events} within {_ANSWER_SECONDS:g} s")
                time.sleep(_AGAIN_SECONDS)
        return found
