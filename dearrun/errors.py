"""Errors of launching: what the user has to correct, and what a function raised that ranks have called."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["LaunchError", "RankError"]


class LaunchError(Exception):
    """A job cannot start as the user asks; shown as one line with the remedy in it."""


class RankError(RuntimeError):
    """A rank of :func:`dearrun.run.run` raised, or ended without an answer. The message has its traceback.

    Attributes:
        rank: the first one that failed.
        exceptions: what each rank raised that had said so by then, by rank. What cannot be pickled is a ``RuntimeError``
            with the same words. A rank that ended without an answer has none.
        tracebacks: their tracebacks, as Python prints them, by rank.
    """

    def __init__(
        self, message: str, rank: int, exceptions: Mapping[int, BaseException], tracebacks: Mapping[int, str]
    ) -> None:
        super().__init__(message)
        self.rank, self.exceptions, self.tracebacks = rank, dict(exceptions), dict(tracebacks)

    def __reduce__(self) -> tuple[type[RankError], tuple[object, ...]]:
        return type(self), (str(self), self.rank, self.exceptions, self.tracebacks)
