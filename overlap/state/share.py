"""Full optimizer state from shares that lie on all ranks, for whoever asks and without anybody's help.

A rank that calls ``state_dict()`` asks the others by peer queries, whose threads answer while their main threads
train on. [Note: nobody overtakes a step] in `overlap.core.step` is why the answers belong to the same step.

[Note: who has loaded by when]
load_state_dict() waits for nobody: Horovod's scripts load on rank 0 alone and broadcast afterwards. So between two steps
some ranks have loaded a state and others have not, or not yet. Until its next update, a rank that has loaded keeps all it
loaded, and asks nobody; and it keeps the share it had before, which is the answer for those who still have to ask. What
a script changes in the state meanwhile it changes on every rank in that rank's part, so nobody has all of it: who asks for
the whole then is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from overlap.state.pieces import PieceState
from overlap.transport.peer_queries import PeerQueries

__all__ = ["StateShare"]

_ANSWER_SECONDS = 600.0


class StateShare:
    """Counts steps; exports this rank's share between updates; collects everybody's."""

    def __init__(self, others: Sequence[int], peer_queries: PeerQueries) -> None:
        self._others = list(others)  # ranks in the job
        self._peer_queries, self._topic = peer_queries, ""
        self._export: Callable[[], PieceState] = dict
        self._changed = threading.Condition()
        self._steps = 0
        # From load_state_dict() to the next update: [Note: who has loaded by when].
        self._before: PieceState | None = None
        self.loaded: dict[int, dict[str, Any]] | None = None  # by slot: parameters must not be kept alive here

    def serve(self, topic: str, export: Callable[[], PieceState]) -> None:
        """From now on answer the other ranks' questions about `topic` by what `export` gives."""
        self._topic, self._export = topic, export
        self._peer_queries.on(topic, self._answer)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around every update of the state, or of who holds which part of it: nobody reads it meanwhile.

        It counts as a step: a question asked after it is not answered from before it.
        """
        with self._changed:
            yield
            self._steps += 1
            self._before = self.loaded = None
            self._changed.notify_all()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Around a replacement of the state that is no step."""
        with self._changed:
            yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around a replacement by a state that other ranks have not loaded yet, or never will."""
        with self._changed:
            if self._before is None:
                self._before = self._export()
            yield

    def collect(self) -> list[PieceState]:
        """Every rank's share, this rank's first. Raises :class:`NoAnswer` if one does not come."""
        asked = [(rank, self._peer_queries.ask(rank, self._topic, self._steps)) for rank in self._others]
        with self._changed:
            shares = [self._export()]
        return shares + [PeerQueries.wait(answer, rank, self._topic, _ANSWER_SECONDS) for rank, answer in asked]

    def _answer(self, _sender: int, steps: int) -> PieceState:
        with self._changed:
            self._changed.wait_for(lambda: self._steps >= steps, timeout=_ANSWER_SECONDS)
            if self._steps != steps:
                raise RuntimeError(f"asked for the state after step {steps}, this rank is at step {self._steps}")
            return self._export() if self._before is None else self._before
