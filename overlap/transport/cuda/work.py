"""Operations on tensors of a device, and how to wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from overlap.transport.cuda.streams import Moment
from overlap.transport.work import Work, WorkAround, operations

__all__ = ["NcclWork", "StagedWork"]


class NcclWork(WorkAround):
    """An operation over NCCL, and what the device makes of its result afterwards, which ends at `moment`."""

    def __init__(
        self, work: Work, moment: Moment | None, current: Callable[[], int], title: tuple[str, str, int]
    ) -> None:
        super().__init__(work)
        self.op, self.label, self.nbytes = title
        self._moment, self._current = moment, current
        self._ordered: set[int] = set()  # streams that wait for it already

    def arrive(self) -> bool:
        """Let what this thread's stream is given next see the result; the host goes on.

        Returns whether other streams have to wait, too: the device is not past it. Raises the error of an operation that
        has failed: what is in its memory is no result.
        """
        error = self._work.exception()
        if error is not None:
            raise error
        stream = self._current()
        if stream not in self._ordered:
            self._ordered.add(stream)
            self.order_before(stream)
        return not self.done()

    def wait(self, timeout: float | None = None) -> None:
        self._work.wait(timeout)
        if self._moment is not None:
            self._moment.wait()

    def done(self) -> bool:
        return self._work.done() and (self._moment is None or self._moment.done())

    def order_before(self, stream: int) -> None:
        (self._work if self._moment is None else self._moment).order_before(stream)


class StagedWork(WorkAround):
    """An operation of the host's on copies, whose results are carried to the device by `land`, called once.

    Whoever arrives, waits or orders first carries them, so somebody has to; other streams follow the moment that `land`
    gives (None: nothing is left to wait for).
    """

    def __init__(self, work: Work, land: Callable[[int | None], Moment | None], current: Callable[[], int]) -> None:
        super().__init__(work)
        self._current = current
        self._land: Callable[[int | None], Moment | None] | None = land
        self._moment: Moment | None = None

    @property
    def operations(self) -> Sequence[tuple[float, Work]] | None:
        """See :func:`overlap.transport.work.operations`."""
        return operations(self._work)

    def _carry(self, stream: int | None) -> None:
        if self._land is not None:
            land, self._land = self._land, None  # with its memory: who measures keeps works for long
            self._moment = land(stream)
        elif self._moment is not None:
            self._moment.order_before(self._current() if stream is None else stream)

    def arrive(self) -> bool:
        """Wait for the host's part, and let what this thread's stream is given next see the result.

        Returns whether other streams have to wait, too: the copies are not on the device yet.
        """
        self.wait()
        return self._moment is not None and not self._moment.done()

    def wait(self, timeout: float | None = None) -> None:
        self._work.wait(timeout)
        self._carry(None)

    def order_before(self, stream: int) -> None:
        self._work.wait()
        self._carry(stream)
