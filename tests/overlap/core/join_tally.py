"""The library's tally with three numbers more, by which ranks hear of those that have joined: see `join_model.py`.

The library's own numbers come first. Its verdict stands wherever join() has nothing to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum, auto

from overlap.core.tally import Calls, Heard, Said, Verdict, verdict

_NO_RANK = -1
_LIBRARYS = [field.name for field in fields(Heard)]


@dataclass(frozen=True)
class JoinSaid(Said):
    """As the library's. A rank that gives no `number` has joined; its `failed` says that it has gradients left."""

    gone: bool = False  # it has joined, and its optimizer is no more: its round means nothing
    needs: int = 0  # which call this is, or was, of those that cannot be made while some have joined

    def numbers(self) -> list[int]:
        joined = self.rank if self.number is None else _NO_RANK
        return [*super().numbers(), joined, self.rank if self.gone else _NO_RANK, self.needs]


@dataclass(frozen=True)
class JoinHeard(Heard):
    joined: int | None  # one of the ranks that have joined …
    gone: int | None  # … and of those whose optimizer is no more
    needs: int  # the call that cannot be made with them, or 0

    @classmethod
    def of(cls, numbers: Sequence[int]) -> JoinHeard:
        *librarys, joined, gone, needs = numbers
        heard = Heard.of(librarys)
        return cls(*(getattr(heard, name) for name in _LIBRARYS), _rank(joined), _rank(gone), needs)


def _rank(number: int) -> int | None:
    return None if number == _NO_RANK else number


class JoinVerdict(Enum):
    """What else all ranks may do next."""

    JOINED = auto()  # all ranks have
    GONE = auto()  # some have whose optimizer is no more, and others go on with it
    REFUSED = auto()  # some have, and others have come to a call that needs them


def join_verdict(heard: JoinHeard) -> Verdict | JoinVerdict:
    """The same on all ranks. Pure."""
    if heard.last is None:
        return JoinVerdict.JOINED
    if heard.gone is not None:  # before a drop, whose round it cannot complete, and before a look at its round
        return JoinVerdict.GONE
    if heard.needs and heard.joined is not None and heard.first_round == heard.last_round and heard.drop is None:
        return JoinVerdict.REFUSED  # after a drop it is said again
    return verdict(heard)


class JoinCalls(Calls):
    def meet(self) -> None:
        """All ranks have joined. What they have called since their last step is not the same, so no call is free."""
        self.drop()
        self._free = 0
