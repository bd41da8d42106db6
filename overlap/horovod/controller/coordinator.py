"""Decides on rank 0 what happens next, from what the ranks have asked for (pure: a request in, responses out).

    rank 1  allreduce b ──┐                                              every rank carries out b, then a
    rank 0  allreduce a ──┤ coordinator: b is complete ─► response b ─►
    rank 1  allreduce a ──┤              a is complete ─► response a ─►
    rank 0  allreduce b ──┘  (in the order in which the last rank asked)

An operation is complete when every rank of its process set has asked for it, or has joined. Ranks that disagree all get
the same error, and nothing is sent. Whatever waits for a rank that has shut down is answered with an error at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from overlap.horovod.controller.request import Kind, Request, Response, disagreement

__all__ = ["Coordinator", "Decision", "Stalled", "Waiting"]

_Key = tuple[int, Kind, str]

#: A response and the ranks to tell.
Decision = tuple[tuple[int, ...], Response]

#: What ranks without data can still take part in, as in Horovod.
_WITH_JOINED = (Kind.ALLREDUCE, Kind.BARRIER)


@dataclass
class Waiting:
    """An operation that some rank has asked for and not every rank yet."""

    since: float
    requests: dict[int, Request] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return next(iter(self.requests.values())).title

    @property
    def kind(self) -> Kind:
        return next(iter(self.requests.values())).kind


class Stalled:
    """An operation that waits, with the ranks that are missing; the watchdog uses it as a `Work`."""

    def __init__(self, waiting: Waiting, missing: Sequence[int]) -> None:
        self._since, self._title = waiting.since, waiting.title
        self._asked, self._missing = sorted(waiting.requests), list(missing)

    @property
    def seconds(self) -> float:
        """Time since the first rank asked for it."""
        return time.monotonic() - self._since

    def describe(self) -> str:
        return f"{self._title} (asked for by ranks {self._asked}, missing: ranks {self._missing})"


class Coordinator:
    """Rank 0's table of everything that was asked for and is not answered; process set 0 is all ranks."""

    def __init__(self, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._next_set = 1
        self._waiting: dict[_Key, Waiting] = {}
        self._joined: dict[int, None] = {}  # in the order of joining
        self._left: dict[int, str] = {}  # and why
        self._clock = clock

    def members(self, process_set: int) -> tuple[int, ...]:
        """The ranks of a process set; none where there is no such set (any more)."""
        return self._sets.get(process_set, ())

    @property
    def everybody_left(self) -> bool:
        return len(self._left) == len(self._sets[0])

    def submit(self, rank: int, request: Request) -> list[Decision]:
        """Note what `rank` asks for. Returns what is decided by that, in order, each with the ranks to tell."""
        members = self.members(request.process_set)
        if rank not in members:
            text = f"{request.title}: process set {request.process_set} was removed, or rank {rank} is not in it"
            return [((rank,), Response(request, error=text))]
        if request.kind is Kind.JOIN:
            self._joined[rank] = None
        key = (request.process_set, request.kind, request.name)
        waiting = self._waiting.setdefault(key, Waiting(self._clock()))
        waiting.requests[rank] = request
        # A rank that joined may be the last one that other operations waited for. The join itself comes after them.
        others = [other for other in self._waiting if other[1] is not Kind.JOIN] if request.kind is Kind.JOIN else []
        return self._decide([*others, key])

    def leave(self, rank: int, why: str) -> list[Decision]:
        """Note that `rank` will ask for nothing more: whatever waits for it never happens."""
        self._left[rank] = why
        return self._decide(list(self._waiting))

    def give_up(self, text: str) -> list[Decision]:
        """Fail everything that waits, with `text`, since no rank will ever ask for what is missing."""
        given_up = [
            (self._sets[key[0]], Response(next(iter(waiting.requests.values())), error=text))
            for key, waiting in self._waiting.items()
        ]
        self._waiting.clear()
        self._joined.clear()
        return given_up

    def missing(self) -> list[tuple[Waiting, list[int]]]:
        """Everything that waits, oldest first, with the ranks that have not asked for it."""
        found = [(waiting, self._absent(key)) for key, waiting in self._waiting.items()]
        return sorted(found, key=lambda entry: entry[0].since)

    def _absent(self, key: _Key) -> list[int]:
        asked = self._waiting[key].requests
        present = asked if key[1] is Kind.JOIN else {**asked, **self._joined}
        return [rank for rank in self._sets[key[0]] if rank not in present]

    def _decide(self, keys: list[_Key]) -> list[Decision]:
        decided = []
        for key in keys:
            absent = self._absent(key)
            gone = [rank for rank in absent if rank in self._left]
            if gone:
                waiting = self._waiting.pop(key)
                if key[1] is Kind.JOIN:  # it failed: whoever goes on is asked again
                    for rank in waiting.requests:
                        self._joined.pop(rank, None)
                text = f"{waiting.title}: rank {gone[0]} {self._left[gone[0]]} and will not take part"
                response = Response(next(iter(waiting.requests.values())), error=text)
            elif absent:
                continue
            else:
                response = self._complete(key, self._waiting.pop(key).requests)
            decided.append((self._sets[key[0]], response))
            decided += self._enact(response)
        return decided

    def _complete(self, key: _Key, requests: dict[int, Request]) -> Response:
        members = self._sets[key[0]]
        first = requests[min(requests)]
        joined = () if first.kind is Kind.JOIN else tuple(rank for rank in members if rank not in requests)
        text = disagreement(requests)
        if text:
            return Response(first, error=text, mismatch=True)
        if joined and first.kind not in _WITH_JOINED:
            return Response(first, error=f"{first.title}: not possible after rank {joined[0]} has joined")
        if first.kind in (Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET):
            return self._change_sets(first)
        return Response(
            requests.get(first.root, first),
            rows=self._rows(requests) if first.kind is Kind.ALLGATHER else (),
            splits=tuple(requests[rank].splits for rank in members) if first.kind is Kind.ALLTOALL else (),
            number=list(self._joined)[-1] if first.kind is Kind.JOIN else -1,
        )

    @staticmethod
    def _rows(requests: dict[int, Request]) -> tuple[tuple[int, ...], ...]:
        of_ranks = [[spec.shape[0] for spec in request.tensors] for _, request in sorted(requests.items())]
        return tuple(zip(*of_ranks, strict=True))

    def _change_sets(self, request: Request) -> Response:
        alike = [number for number, ranks in self._sets.items() if number and ranks == request.ranks]
        outside = [rank for rank in request.ranks if rank not in self._sets[0]]
        text = ""
        if request.kind is Kind.REMOVE_PROCESS_SET:
            return (
                Response(request, number=alike[0])
                if alike
                else Response(request, error=f"{request.title}: no such set")
            )
        if alike or request.ranks == self._sets[0]:
            text = f"process set {alike[0] if alike else 0} has the same ranks {list(request.ranks)} already"
        elif outside:
            text = f"ranks {outside} are not in this job of {len(self._sets[0])}"
        elif not request.ranks:
            text = "it has no ranks"
        if text:
            return Response(request, error=f"{request.title}: {text}", mismatch=True)
        return Response(request, number=self._next_set)

    def _enact(self, response: Response) -> list[Decision]:
        """Decisions that change what later requests mean take effect here, on all ranks at the same place."""
        request, number = response.request, response.number
        if response.error:
            return []
        if request.kind is Kind.JOIN:
            self._joined.clear()
        elif request.kind is Kind.ADD_PROCESS_SET:
            self._sets[number] = request.ranks
            self._next_set = number + 1
        elif request.kind is Kind.REMOVE_PROCESS_SET:
            members = self._sets.pop(number)
            orphans = [self._waiting.pop(key) for key in list(self._waiting) if key[0] == number]
            return [
                (members, Response(next(iter(orphan.requests.values())), error=f"{orphan.title}: the set was removed"))
                for orphan in orphans
            ]
        return []
