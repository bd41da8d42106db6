"""Completes the futures of a group's operations, on one thread that there is once somebody asks for a future."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

import comm_core

__all__ = ["Completer", "Settle"]

#: Waits for an operation, as many seconds at most; None: as long as it takes. Raises ``comm_core.TimeoutError`` then.
Settle = Callable[[float | None], object]


class Completer:
    """Waits for operations, and completes their futures.

    `turn` is how long it waits for one before it looks at the next, in seconds; None, as long as it takes: they end in the
    order in which they were issued.
    """

    def __init__(self, name: str, turn: float | None) -> None:
        self._turn = turn
        self._promised: queue.SimpleQueue[Callable[[], bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"dear-futures {name}", daemon=True)
        self._thread.start()

    def promise(self, settle: Settle, result: Callable[[], Any]) -> torch.futures.Future[Any]:
        """A future of `result`, once `settle` returns. It has the error that `settle` raises."""
        settled: torch.futures.Future[Any] = torch.futures.Future()
        failed: list[BaseException] = []

        def outcome(_: Any) -> Any:
            # Raised in here, C++ sees an error; of set_exception() it would see a value.
            if failed:
                raise failed[0]
            return result()

        def is_settled() -> bool:
            try:
                settle(self._turn)
            except comm_core.TimeoutError:
                return False
            except BaseException as error:  # whatever it is: somebody waits
                failed.append(error)
            settled.set_result(None)
            return True

        self._promised.put(is_settled)
        return settled.then(outcome)

    def _run(self) -> None:
        closing = False
        while not closing or not self._promised.empty():
            one = self._promised.get()
            if one is None:
                closing = True
            elif not one():
                self._promised.put(one)
            del one  # it has tensors, which would live until the next one

    def is_current(self) -> bool:
        """Whether the calling thread is the one that completes futures here, in a callback of one."""
        return self._thread is threading.current_thread()

    def close(self) -> None:
        """End the thread, now that all operations are over."""
        self._promised.put(None)
        if not self.is_current():
            self._thread.join()
