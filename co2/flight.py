"""A round on its way: a thread that sees it through while the main thread makes local steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Flight"]


class Flight:
    """Runs `work` at once, on a thread that ends with it. What it raises, :meth:`land` raises."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="dear-co2-round", daemon=True).start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Whether it is done, at the latest after so many seconds."""
        return self._done.wait(seconds)

    def land(self) -> None:
        """Wait until it is done."""
        self._done.wait()
        if self._error is not None:
            raise self._error
