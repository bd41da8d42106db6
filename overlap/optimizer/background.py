"""Writes checkpoints on a thread while training goes on, one after the other."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from overlap.job.session import Session

__all__ = ["Background", "background_of"]

_SERVICE = "checkpoints"


class Background:
    """The thread, and a group of all ranks of its own, on which it agrees with those of the other ranks."""

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._group = None if alone else torch.distributed.new_group(backend="gloo")
        self._threads = ThreadPoolExecutor(1, "dear-checkpoints")
        self._latest: Future[None] | None = None

    def save(self, state: dict[str, Any], path: str | os.PathLike[str]) -> Future[None]:
        """Write `state`, which nobody writes to any more, into the folder `path`. On every rank.

        Waits until the one before is written: there is one copy at a time.
        """
        from torch.distributed.checkpoint.state_dict_saver import save

        def write() -> None:
            save(state, checkpoint_id=path, process_group=self._group, no_dist=self._alone)

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
        found = session.services[_SERVICE] = Background(alone=session.comm.size == 1)
    return found
