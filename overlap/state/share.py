"""Collects the full optimizer state from all ranks' shares, for whoever asks, without a call on the other ranks.

A rank that calls ``state_dict()`` asks the others by peer queries, whose threads answer while their main threads
train on. [Note: nobody overtakes a step] in `overlap.core.step` is why the answers belong to the same step.

[Note: who has loaded by when]
load_state_dict() waits for nobody: Horovod's scripts load on rank 0 alone and broadcast afterwards. So between two steps
some ranks have loaded a state and others have not, or not yet. Until its next update, a rank that has loaded keeps all it
loaded, and asks nobody; and it keeps the share it had before, which is the answer for those who still have to ask.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from overlap.state.pieces import PieceState
from overlap.transport.peer_queries import PeerQueries

__all__ = ["OUTLINE", "StateShare", "Which"]

# Of which slot a rank tells its part: its index; None: of all; or only which ones have state. Of those in a tuple it tells
# its part of the parameters themselves.
Which = int | tuple[int, ...] | None
OUTLINE = -1

_ANSWER_SECONDS = 600.0


class StateShare:
    """Counts steps, exports this rank's share between updates, and collects everybody's."""

    def __init__(self, others: Sequence[int], peer_queries: PeerQueries) -> None:
        self._others = list(others)  # ranks in the job
        self._peer_queries, self._topic = peer_queries, ""
        self._export: Callable[[Which], PieceState] = lambda _which: {}
        self._changed = threading.Condition()
        self._steps = 0
        self._taken: Counter[int] = Counter()  # how often this rank has loaded each parameter since, by slot
        # From load_state_dict() to the next update: [Note: who has loaded by when].
        self._before: PieceState | None = None
        self.loaded: dict[int, dict[str, Any]] | None = None  # by slot: parameters must not be kept alive here
        # What scripts have read and written since the last update, and what takes it over: see `overlap.state.rows`.
        self.copies: dict[torch.Tensor, dict[str, Any] | None] = {}
        self.flush: Callable[[], None] = self.copies.clear

    def serve(self, topic: str, export: Callable[[Which], PieceState]) -> None:
        """From now on answer the other ranks' questions about `topic` by what `export` gives."""
        self._topic, self._export = topic, export
        self._peer_queries.on(topic, self._answer, waits=True)

    def take_over(self) -> None:
        """Give the pieces what scripts have written."""
        with self._changed:
            if self.copies:
                self.flush()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """A context around every update of the state, or of who holds which part of it, in which nobody reads it.

        It counts as a step: a question asked after it is not answered from before it.
        """
        with self._changed:
            if self.copies:
                self.flush()
            yield
            self._steps += 1
            self._taken.clear()
            self._before = self.loaded = None
            self._changed.notify_all()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """A context around a replacement of the state that is no step."""
        with self._changed:
            if self.copies:
                self.flush()
            yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A context around a replacement by a state that other ranks have not loaded yet, or never will."""
        with self._changed:
            if self._before is None:
                self._before = self._export(None)
            yield

    @contextmanager
    def taking(self, slot: int) -> Iterator[None]:
        """A context in which this rank takes its share of a parameter that every rank loads.

        Whoever has loaded it gets no answer about it from ranks that have not.
        """
        with self.replacing():
            yield
            self._taken[slot] += 1
            self._changed.notify_all()

    def collect(self, which: Which = None) -> list[PieceState]:
        """Every rank's share, this rank's first. Raises :class:`NoAnswer` if one does not come.

        `which`: of one slot by its index, or with ``OUTLINE`` of all, without values; or the parameters of slots.
        """
        question: tuple[Any, ...] = self._steps, which
        if isinstance(which, tuple):
            question = (*question, tuple(self._taken[slot] for slot in which))
        asked = [(rank, self._peer_queries.ask(rank, self._topic, question)) for rank in self._others]
        with self._changed:
            shares = [self._export(which)]
        return shares + [PeerQueries.wait(answer, rank, self._topic, _ANSWER_SECONDS) for rank, answer in asked]

    def _answer(self, _sender: int, question: tuple[Any, ...]) -> PieceState:
        steps, which, *loaded = question
        with self._changed:
            self._changed.wait_for(
                lambda: self._steps > steps or (self._steps == steps and self._has_taken(which, *loaded)),
                timeout=_ANSWER_SECONDS,
            )
            if self._steps != steps:
                raise RuntimeError(f"asked for the state after step {steps}, this rank is at step {self._steps}")
            if self._before is None or isinstance(which, tuple):
                return self._export(which)
            return _chosen(self._before, which)

    def _has_taken(self, which: Which, loaded: Sequence[int] = ()) -> bool:
        """Whether this rank has loaded the parameters of slots as often as the one that asks."""
        slots = which if isinstance(which, tuple) else ()
        return all(self._taken[slot] >= count for slot, count in zip(slots, loaded, strict=False))


def _chosen(parts: PieceState, which: int | None) -> PieceState:
    if which == OUTLINE:
        return {index: (start, stop, {}) for index, (start, stop, _) in parts.items()}
    return parts if which is None else {index: part for index, part in parts.items() if index == which}
