"""Random numbers of ranks that share a model: the same in what they share, and others in what is divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint

from model_parallel.initialize import get_model_parallel_rank

__all__ = ["checkpoint", "get_rng_tracker", "model_parallel_manual_seed"]

_NAME = "model-parallel-rng"
_APART = 2718  # as in Megatron-LM and fairscale


class RngTracker:
    """States of torch's generators, by name, beside the one in force; :meth:`fork` changes to one of them."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def reset(self) -> None:
        """Forget all states."""
        self._states.clear()

    def get_states(self) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
        """The states, to be saved: of the CPU's generator, and of the current GPU's, where one is in use."""
        return dict(self._states)

    def set_states(self, states: dict[str, tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Take over `states`, as :meth:`get_states` has returned them."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Make a state from `seed`. Raises ``ValueError`` for a `name` that is there."""
        if name in self._states:
            raise ValueError(f"there is a state named {name!r} already: reset() forgets all")
        before = _state()
        torch.manual_seed(seed)
        self._states[name] = _state()
        _take(before)

    @contextmanager
    def fork(self, name: str = _NAME) -> Iterator[None]:
        """A context whose random numbers are those of `name`, which go on from there the next time.

        Raises ``KeyError`` for a name that was not added.
        """
        if name not in self._states:
            raise KeyError(f"there is no state named {name!r}: call model_parallel_manual_seed(seed) first")
        before = _state()
        _take(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _state()
            _take(before)


def _state() -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def _take(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


_tracker = RngTracker()


def get_rng_tracker() -> RngTracker:
    """The states of this process."""
    return _tracker


def model_parallel_manual_seed(seed: int) -> None:
    """Seed torch with `seed`, and the numbers of :meth:`RngTracker.fork` with one of this rank's own.

    Ranks that share a model give the same `seed`: dropout of what they all have is the same on each then, and dropout of
    what is divided belongs inside ``with get_rng_tracker().fork():``.
    """
    _tracker.reset()
    _tracker.add(_NAME, seed + _APART + get_model_parallel_rank())
    torch.manual_seed(seed)


def checkpoint(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """``torch.utils.checkpoint.checkpoint``, without reentry, whose recomputation draws the same numbers in forks, too."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return _nothing(), _again(_tracker.get_states())

    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **named)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _again(states: dict[str, tuple[torch.Tensor, torch.Tensor | None]]) -> Iterator[None]:
    before = _tracker.get_states()
    _tracker.set_states(states)
    try:
        yield
    finally:
        _tracker.set_states(before)
