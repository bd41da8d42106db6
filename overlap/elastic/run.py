"""``elastic.run``, around a training function: takes up the last commit, and leaves a state for the next job."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from overlap.elastic import stop_request
from overlap.elastic.state import State

__all__ = ["run"]

R = TypeVar("R")
log = logging.getLogger("dear")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorate a training function whose first argument is a :class:`State`. On every rank.

    Before the function, the newest complete commit of an earlier job is taken up, or rank 0's values where there is
    none. When the function returns, commits are removed. When it raises, they stay, the exception goes on, and the job
    ends with it: launching it again, at any world size, continues from the last commit.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        if not isinstance(state, State):
            raise TypeError(f"the first argument should be an elastic State and is {type(state).__name__}")
        with stop_request.heeded():
            if not state.resume():
                state.sync()
            result = func(state, *args, **kwargs)
        state.finished()
        return result

    return wrapper
