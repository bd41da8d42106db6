"""Writes checkpoints by ``torch.distributed.checkpoint``, also on a thread while training goes on, one after the other."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from overlap.job.default_ranks import default_ranks, group_of
from overlap.job.session import Session

__all__ = ["Background", "among", "background_of", "told_by_all"]

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


def among(session: Session, what: str) -> dict[str, Any]:
    """Arguments for ``torch.distributed.checkpoint`` by which the ranks of the job agree, and no others. On every rank.

    Raises ``RuntimeError`` on all of them where no default group of torch.distributed has them all; `what` needs it.
    """
    if session.comm.size == 1:
        there = torch.distributed.is_available() and torch.distributed.is_initialized()
        return {"no_dist": True} if there and torch.distributed.get_world_size() > 1 else {}
    ranks = default_ranks(session.control, what)
    return {} if len(ranks) == torch.distributed.get_world_size() else {"process_group": group_of(ranks)}


class Background:
    """The thread, and a group of its own, of all ranks of the job, on which it agrees with theirs.

    `together` is what :func:`among` gives.
    """

    def __init__(self, session: Session, together: dict[str, Any]) -> None:
        self._rank, self._arguments = session.comm.rank, dict(together)
        if session.comm.size > 1:
            group = together.get("process_group") or torch.distributed.GroupMember.WORLD
            ranks = torch.distributed.get_process_group_ranks(group)
            self._arguments["process_group"] = group_of(ranks, "checkpoints")
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


def background_of(session: Session, together: dict[str, Any]) -> Background:
    """The session's; made by the first call, on every rank, with what is :func:`among` its ranks."""
    found = session.services.get(_SERVICE)
    if not isinstance(found, Background):
        found = session.services[_SERVICE] = Background(session, together)
    return found
