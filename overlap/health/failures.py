"""Ends the whole job, with the traceback, as soon as one rank fails."""

from __future__ import annotations

import io
import re
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from types import TracebackType

from comm_core import TransportError
from overlap.health.explained import Meaning

__all__ = ["connection_lost", "explain", "install", "remove", "say_in_one_line", "say_what_is_under_way"]

# What ranks raise that are all there, and mean different things.
_CAUSES = (  # in the text of an error that says by itself what has happened
    "issue the same operations in the same order",
    "disagree about the order or the sizes of operations",
    "torch.distributed's store, which is out of reach",
    "has closed the communicator",
)
_PATIENCE_SECONDS = 20.0  # of a rank that waits for rank 0 to come as far, which may take that long to import torch
_previous: Callable[..., object] | None = None
_hosts: Sequence[str] = ()  # of the job's ranks


def _unexplained(_channel: str, _label: str) -> str:
    return ""


_meaning: Meaning = _unexplained


def install(
    rank: int, size: int, abort: Callable[[int], None], hosts: Sequence[str] = (), meaning: Meaning = _unexplained
) -> None:
    """From now on an uncaught exception prints its traceback and aborts the whole job, whose ranks are on `hosts`.

    `meaning` tells what the labels of operations stand for. Without this hook the interpreter would wait at exit for peers
    which wait in a collective for this rank.
    """
    global _previous, _hosts, _meaning
    if size == 1 or _previous is not None:
        return
    _previous, _hosts, _meaning = sys.excepthook, hosts, meaning

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        # torch.distributed's own hook calls this one, collects what it says, and would show it afterwards.
        stderr = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None else sys.stderr
        stderr.write(f"rank {rank} of {size} failed:\n{text}{explain(error, rank, size, hosts, meaning)}")
        stderr.flush()
        sys.stdout.flush()
        abort(1)

    sys.excepthook = report


def explain(
    error: BaseException, rank: int, size: int, hosts: Sequence[str] = (), meaning: Meaning = _unexplained
) -> str:
    """A last line below the traceback of a rank that only noticed the loss of another one; else empty (pure)."""
    if not isinstance(error, TransportError) or any(reason in str(error) for reason in _CAUSES):
        return ""
    found = re.search(r"\brank \d+ of (\d+) lost the connection to rank (\d+)", str(error)) or re.search(
        r"\(rank \d+ of (\d+)\b.*?\b(?:from|to) rank (\d+)", str(error), re.DOTALL
    )
    whole = found is not None and int(found[1]) == size  # else the numbers are those of a part of the job
    peer = "another rank"
    if found is not None and whole:
        number = int(found[2])
        peer = f"rank {number} on {hosts[number]}" if number < len(hosts) else f"rank {number}"
    operation = re.match(r"\w+ '([^']+)'", str(error))
    words = meaning("", operation[1]) if operation is not None else ""
    during = f" during {operation[0]} ({words})" if operation is not None and words else ""
    return (
        f"rank {rank} of {size} lost its connection to {peer}{during}: that rank was killed or failed by itself, and its "
        "own traceback, or the launcher's last lines, say why; or, where they say nothing, its host or the network between "
        "them is gone\n"
    )


def connection_lost(rank: int, size: int, peers: Collection[int], awaited: Sequence[str]) -> TransportError:
    """An error for a rank that has lost a connection which is not ours, while it waited for something of `peers`."""
    peer = f"rank {next(iter(peers))}" if len(peers) == 1 else "another rank"
    during = f" while it waited for {', '.join(awaited)}" if awaited else ""
    return TransportError(f"rank {rank} of {size} lost the connection to {peer}{during}")


def remove() -> None:
    """Put the previous exception hook back."""
    global _previous
    if _previous is not None:
        sys.excepthook = _previous
        _previous = None


def say_what_is_under_way(rank: int, size: int) -> None:
    """Show the exception that is being handled, or that passes through a ``finally:``, if there is one.

    Whoever waits for other ranks then may be ended by them, and would take it along.
    """
    error = sys.exc_info()[1]
    if size > 1 and isinstance(error, Exception):
        text = "".join(traceback.format_exception(error))
        told = explain(error, rank, size, _hosts, _meaning)
        sys.stderr.write(f"rank {rank} of {size} calls shutdown() during an exception:\n{text}{told}")
        sys.stderr.flush()


def say_in_one_line(error: BaseException, rank: int) -> None:
    """End this process without a traceback where nobody catches `error`, which the user has to correct.

    Other ranks have most likely met the same. Rank 0 says it. The launcher then ends the others, which wait for that: one
    that ended by itself might take rank 0 with it before that has spoken. Who is still there after a while says it as well.
    """
    previous, kind = sys.excepthook, type(error)

    def report(raised: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(raised, kind):
            previous(raised, error, trace)
            return
        if rank > 0:
            time.sleep(_PATIENCE_SECONDS)
        sys.stderr.write(f"{error}\n")

    sys.excepthook = report
