"""A stage that fails tells the other ranks of its pipeline, whose waits for its messages end, and all raise.

    rank 1    F0 F1 F2 ✕ ── letter ──▶ rank 0, rank 2: connections for messages are closed ── all: end of the step, raise

Without that they would wait for as long as torch's group does, half an hour, where the script of rank 1 goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from overlap.health.failures import connection_lost
from overlap.job.axes import Axis
from overlap.job.session import current
from overlap.transport.objects import allgather_object
from overlap.transport.torch.gloo import tear_down
from pipe.progress import Progress

__all__ = ["Failing"]

log = logging.getLogger("dear")

_LETTER_SECONDS = 3.0  # that a letter may come later than the end of a connection


class Failing:
    """What has ended a pipeline along `axis`, whose messages go over torch's `group`. On every rank of the axis."""

    def __init__(self, axis: Axis, group: Any, progress: Progress) -> None:
        self._axis, self._group, self._progress = axis, group, progress
        self._me = axis.ranks[axis.rank]
        self._ended = threading.Event()
        self._error: Exception | None = None
        self.why = ""
        """Empty as long as the pipeline goes on."""
        self._topic = f"pipeline {group.group_name}"
        current().peer_queries.on(self._topic, lambda _sender, why: self._hear(why))

    def _hear(self, why: str) -> None:
        """On the thread that reads letters: end this rank's waits."""
        self._end(why)
        if torch.distributed.get_backend(self._group) == "gloo":
            tear_down(self._group._get_backend(torch.device("cpu")))

    def _end(self, why: str) -> None:
        self.why = self.why or why
        self._ended.set()

    def _tell(self, why: str) -> None:
        self._end(why)
        for rank in self._axis.ranks:
            if rank != self._me:
                with suppress(Exception):  # that one is gone, too
                    current().peer_queries.tell(rank, self._topic, why)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """A context in which stages compute and send; what is raised there, :meth:`settle` raises."""
        try:
            yield
        except Exception as error:
            self._error = self._judged(error)

    def settle(self, found: Any) -> Any:
        """What the last rank has `found` in a step, on every rank of the axis, or the error of one of them."""
        error, self._error = self._error, None
        try:
            told = allgather_object(self._axis.comm, (found, self.why))
        except Exception:
            if error is None:
                raise
            raise error from None
        if error is not None:
            raise error
        for _, why in told:
            if why:
                self._end(why)
                raise RuntimeError(why)
        return told[-1][0]

    def _judged(self, error: Exception) -> Exception:
        """The error to raise here; the other ranks are told of it."""
        where = self._progress.at
        if where or not _is_of_connections(error):
            where = f"{where or 'its step'} of the Pipe"
            why = f"rank {self._me} failed in {where}: {_cause(error)}"
            log.error("%s", why, exc_info=error)  # another rank may end the job before this one has raised
            self._tell(why)
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"(in {where})")
            return error
        told: Exception
        if self._ended.wait(_LETTER_SECONDS):
            told = RuntimeError(self.why)
        else:
            told = connection_lost(self._me, current().comm.size, self._progress.sources, self._progress.awaited)
            self._tell(str(told))
        told.__cause__ = error
        return told


def _is_of_connections(error: Exception) -> bool:
    """Whether it may be gloo's, or NCCL's, while no stage computes: these are of no class of their own."""
    return type(error) is RuntimeError or isinstance(error, torch.distributed.DistError)


def _cause(error: BaseException) -> str:
    """The error that torch's own was raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
