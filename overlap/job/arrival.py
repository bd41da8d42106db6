"""Reports which ranks have come to ``init()`` of an MPI job, since ``MPI_Init`` waits for all and tells nothing.

Each rank leaves a file in the folder that Open MPI's daemon has on each host for the job, and removes with it. So a rank
knows of those on its host.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from overlap.job.launch import Launch

__all__ = ["Arrival", "told"]

_FOLDERS = ("PMIX_SERVER_TMPDIR",)  # Open MPI 5, and 4 with its own PMIx


class Arrival:
    """The arrival of this rank and of those on its host."""

    def __init__(self, launch: Launch, environ: Mapping[str, str]) -> None:
        self._launch = launch
        self._awaited: Sequence[int] | None = None
        folder = next((environ[name] for name in _FOLDERS if environ.get(name)), "")
        known = folder and launch.local_rank is not None and launch.local_size is not None
        self._folder = Path(folder) if known and os.path.isdir(folder) else None

    def say(self) -> None:
        """Announce that this rank has come."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / f"dear-arrived-{self._launch.local_rank}").touch()

    def await_ranks(self, ranks: Sequence[int]) -> None:
        """Note the ranks that are missing just now, as is known where ranks meet in a store."""
        self._awaited = ranks

    def describe(self) -> str:
        """A description of what this rank waits for."""
        found: Collection[int] | None = None
        if self._folder is not None:
            names = [path.name for path in self._folder.glob("dear-arrived-*")]
            found = {int(name.rpartition("-")[2]) for name in names}
        return told(self._launch, socket.gethostname(), self._awaited, found)


def told(launch: Launch, host: str, awaited: Collection[int] | None, beside: Collection[int] | None) -> str:
    """The message of a rank that waits in ``init()`` (pure), with the ranks `awaited`, if they are known.

    `beside` are the local ranks of its host that have come, if that is known.
    """
    text = f"rank {launch.rank} of {launch.size} ({host}) waits in init() for the others"
    if awaited is not None:
        return f"{text}: rank(s) {sorted(awaited)} have not come to it" if awaited else f"{text}, which have all come"
    if beside is None or launch.local_size is None:
        return text
    missing = sorted(set(range(launch.local_size)) - set(beside))
    if not missing:
        return f"{text}: all {launch.local_size} of this host have come to it, and some of another host have not"
    whose = "rank(s)" if launch.local_size == launch.size else "local rank(s)"
    return f"{text}: {whose} {missing} of this host have not come to it"
