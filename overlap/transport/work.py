"""An operation that was issued, whichever communicator carries it out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.autograd.profiler import record_function

import comm_core
from overlap.transport.encoding import travels

__all__ = ["Line", "ProfiledWork", "WatchedWork", "Work", "WorkAround", "arrive", "operations"]


class Work(Protocol):
    """An issued operation; `comm_core.Work` has this shape, and so has the torch.distributed adapter's."""

    @property
    def op(self) -> str:
        """The kind of operation: "reduce_scatter", "barrier", …"""

    @property
    def nbytes(self) -> int:
        """Size of the payload."""

    @property
    def label(self) -> str:
        """The caller's name for the operation; the kind of operation when none was given."""

    @property
    def seconds(self) -> float:
        """Time since it was issued, or the whole time it took once it is done."""

    def wait(self, timeout: float | None = None) -> None:
        """Block until done and raise what went wrong; `comm_core.TimeoutError` when `timeout` seconds pass first.

        None and infinity wait for ever; a negative number or NaN raises ValueError at once, also when it is done.
        """

    def done(self) -> bool:
        """Whether `wait()` would return at once. Never blocks."""

    def exception(self) -> comm_core.Error | None:
        """The error of an operation that failed; None while it runs and when it succeeded."""

    def order_before(self, stream: int) -> None:
        """Make what is enqueued on `stream` from now on run after this operation; on the CPU the same as `wait()`."""

    def describe(self) -> str:
        """Operation, label, rank, sizes and state in one line."""


def arrive(work: Work) -> bool:
    """Let what the calling thread computes next see the result: by waiting, on the CPU.

    Returns whether others who read it have to arrive, too: on a device only the stream that is current now waits.

    A work on the memory of a device has an ``arrive()`` of its own, for which streams wait. It is asked for by name, as
    this happens for every bucket of every step, and ``isinstance()`` of a protocol takes 10 µs.
    """
    return getattr(work, "arrive", work.wait)() is True


def operations(work: Work) -> Sequence[tuple[float, Work]] | None:
    """The issued operations behind a work that stands for several, each with its time; else None."""
    return getattr(work, "operations", None)


class WorkAround:
    """The base of a work that stands for another one, and is like it but for what a subclass says."""

    __slots__ = ("_work", "label", "nbytes", "op")

    def __init__(self, work: Work) -> None:
        self.op, self.label, self.nbytes = work.op, work.label, work.nbytes
        self._work = work

    @property
    def seconds(self) -> float:
        return self._work.seconds

    def wait(self, timeout: float | None = None) -> None:
        self._work.wait(timeout)

    def done(self) -> bool:
        return self._work.done()

    def exception(self) -> comm_core.Error | None:
        return self._work.exception()

    def order_before(self, stream: int) -> None:
        self._work.order_before(stream)

    def describe(self) -> str:
        return self._work.describe()


class WatchedWork(WorkAround, ABC):
    """A work whose waits are observed, by :meth:`_watched`. Its caller cannot tell it from the work itself."""

    __slots__ = ()

    @abstractmethod
    def _watched(self, wait: Callable[[], None]) -> None:
        """Call `wait`, which blocks."""

    @property
    def title(self) -> str:
        return self.op if self.label == self.op else f"{self.op} {self.label}"

    def wait(self, timeout: float | None = None) -> None:
        if self._work.done():
            self._work.wait(timeout)
        else:
            self._watched(lambda: self._work.wait(timeout))

    def arrive(self) -> bool:
        if self._work.done():
            return arrive(self._work)
        found: list[bool] = []
        self._watched(lambda: found.append(arrive(self._work)))
        return found[0]


class ProfiledWork(WatchedWork):
    """A work that shows torch's profiler its issue and its waits: ``dear::all_gather b2 …``, ``dear::wait …``."""

    __slots__ = ()

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        with record_function(f"dear::{self.title}", f"{self.nbytes} bytes"):
            pass  # the operation itself goes on, on no thread of Python's

    def _watched(self, wait: Callable[[], None]) -> None:
        with record_function(f"dear::wait {self.title}"):
            wait()


@travels
@dataclass(frozen=True, slots=True)
class Line:
    """A communicator's progress on one rank: the number of operations it issued, and the kinds of unfinished ones."""

    issued: int
    unfinished: tuple[str, ...]

    @property
    def oldest(self) -> int:
        """The number of the oldest unfinished operation, from 0; of the next one where there is none."""
        return self.issued - len(self.unfinished)
