"""What a call of torch.distributed returns: its operations of the engine, and what is left to do when they are done."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]  # torch does not list it
from torch.distributed.distributed_c10d import Work as TorchWork

import comm_core
from comm_core import TransportError
from dear.backend.completion import Completer
from dear.backend.memory import Finish
from overlap.transport.work import Work

__all__ = ["GroupWork", "Owner", "as_one"]

NO_LIMIT = timedelta(0)  # of a wait: the operation's own holds
_MESSAGES = ("send", "recv")


class Owner(Protocol):
    """The group of an operation."""

    ended: str
    """Why no operation of the group goes on, here or on another rank; empty: it goes on."""

    def end(self, reason: str) -> None:
        """End all operations of the group with an error, here and on the other ranks."""

    def completer(self, messages: bool) -> Completer:
        """What completes futures: of `messages` between two ranks, or of collectives."""


# Before 2.7 the C++ of torch keeps no reference to the works in Python that it has. What DDP and DTensor wait for would be
# gone by then, and they would wait forever.
_TORCH_KEEPS = torch.__version__ >= "2.7"
_unwaited: set[TorchWork] = set()  # calls that nobody has waited for yet; where torch does not keep them


class GroupWork(TorchWork):
    """One call: an operation of the engine, and then `finish`, on whatever thread is the first to wait for it.

    It has `seconds`; then its group ends. `outputs` are the tensors with the results.
    """

    def __init__(self, owner: Owner, work: Work, outputs: Sequence[Any], seconds: float, finish: Finish = None) -> None:
        super().__init__()
        self._owner, self._work, self._outputs = owner, work, list(outputs)
        self._seconds, self._until = seconds, time.monotonic() + seconds
        self._finish = finish
        self._lock = threading.Lock()  # of the last one
        self._future: torch.futures.Future[Any] | None = None
        if not _TORCH_KEEPS:
            _unwaited.add(self)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Block until the results are there; True. Raises what went wrong.

        After a `timeout`, ``comm_core.TimeoutError`` is raised, and the operation goes on.
        """
        self.settle(timeout.total_seconds() or None)
        return True

    def settle(self, patience: float | None = None) -> None:
        """:meth:`wait`, in seconds."""
        self._await(patience)
        if self._finish is not None:
            with self._lock, torch.inference_mode():
                finish, self._finish = self._finish, None
                if finish is not None:
                    finish()
        _unwaited.discard(self)

    def _await(self, patience: float | None) -> None:
        work, left = self._work, max(0.0, self._until - time.monotonic())
        try:
            work.wait(left if patience is None else min(left, patience))
        except comm_core.TimeoutError:
            if patience is not None and patience < left:
                raise
            self._owner.end(f"{work.describe()}, and its group has a timeout of {self._seconds:g} s")
            raise TransportError(self._owner.ended) from None
        except TransportError as error:
            if not self._owner.ended or self._owner.ended in str(error):
                raise
            raise TransportError(f"{work.describe()}: {self._owner.ended}") from error

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over. The results are then where the caller looks for them."""
        if not self._work.done():
            return False
        if self.exception() is None:
            self.settle()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> comm_core.Error | None:
        return self._work.exception()

    def result(self) -> list[Any]:
        """The tensors with the results, once they are there."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Of a receive from anybody, the sender's rank in the group."""
        return int(getattr(self._work, "source", -1))

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Of the tensors with the results. A thread of the group completes it."""
        if self._future is None:
            self._future = self._owner.completer(self._work.op in _MESSAGES).promise(self.settle, lambda: self._outputs)
        return self._future


def as_one(works: Sequence[TorchWork]) -> TorchWork:
    """Several calls as one, for which functional collectives wait once for each of them."""
    if len(works) == 1:
        return works[0]
    several = _SeveralWorks(works)
    return several if _TORCH_KEEPS else _create_work_from_future(several.get_future())


class _SeveralWorks(TorchWork):
    """Several calls as one."""

    def __init__(self, works: Sequence[TorchWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Any]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[Any]:
        whole = torch.futures.collect_all([work.get_future() for work in self._works])
        return whole.then(lambda done: [tensor for each in done.value() for tensor in each.value()])
