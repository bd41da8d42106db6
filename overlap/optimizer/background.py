"""Writes checkpoints by ``torch.distributed.checkpoint``, also on a thread while training goes on, one after the other."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from overlap.job.session import Session

__all__ = ["Background", "alone", "background_of", "told_by_all"]

log = logging.getLogger("dear")

_SERVICE = "checkpoints"


@contextmanager
def told_by_all(what: str) -> Iterator[None]:
    """A context that raises ``RuntimeError`` on every rank where one could not do `what`, with the reason."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"rank {rank} could not {what}: {type(reason).__name__}: {reason}") from reason


def alone(session: Session) -> dict[str, Any]:
    """Arguments that keep one process to itself, where the script's process group has others."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return {"no_dist": True} if session.comm.size == 1 and there and torch.distributed.get_world_size() > 1 else {}


class Background:
    """The thread, and a group of all ranks of its own, on which it agrees with those of the other ranks."""

    def __init__(self, session: Session) -> None:
        self._rank, self._arguments = session.comm.rank, alone(session)
        if session.comm.size > 1:
            self._arguments["process_group"] = torch.distributed.new_group(backend="gloo")
        self._threads = ThreadPoolExecutor(1, "dear-checkpoints")
        self._latest: Future[None] | None = None

    def save(self, state: dict[str, Any], path: str | os.PathLike[str]) -> Future[None]:
        """Write `state`, which nobody writes to any more, into the folder `path`. On every rank.

        Waits until the one before is written: there is one copy at a time.
        """
        from torch.distributed.checkpoint.state_dict_saver import save

        def write() -> None:
            try:
                with told_by_all(f"write the checkpoint in {path}"):
                    save(state, checkpoint_id=path, **self._arguments)
            except Exception as error:  # the script may never ask
                if self._rank == 0:
                    log.error("save_checkpoint(background=True) has failed: %s", error)
                raise

        self._wait()
        self._latest = self._threads.submit(write)
        return self._latest

    def _wait(self) -> None:
        if self._latest is not None:
            self._latest.exception()

    def close(self) -> None:
        """Wait for what is being written. On every rank."""
        self._wait()
        self._threads.shutdown()

    def interrupt(self) -> None:
        """Ranks are lost: the default group's end is that of this one, too."""

    def abandon(self) -> None:
        """End the thread once it has nothing to do."""
        self._threads.shutdown(wait=False)


def background_of(session: Session) -> Background:
    """The session's; made by the first call, on every rank."""
    found = session.services.get(_SERVICE)
    if not isinstance(found, Background):
        found = session.services[_SERVICE] = Background(session)
    return found
