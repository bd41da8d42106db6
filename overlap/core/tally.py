"""What the ranks of one optimizer agree on in a call that all of them make: one small all-reduce of numbers.

Whether a rank takes part in a round must not hang on what that rank alone knows: it may have had no batch, or have thawed
another layer than the others. So in a call in which such a thing can make a difference, every rank says what it knows, and
all go on by the largest of what was said, which is the same everywhere. These all-reduces have a communicator of their own.
There operations follow the script's calls; on those that carry buckets they follow the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch

import comm_core
from overlap.transport.communicator import Communicator, ReduceOp, Work

__all__ = ["Said", "Tally"]

_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Said:
    """By one rank; or, as a tally ends, by any of them."""

    gradients: bool = False  # there are some that no step has used
    late: bool = False  # a parameter that is in no bucket takes part


class Tally:
    """One after the other, on every rank of `comm`."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._under_way: tuple[torch.Tensor, Work] | None = None

    def post(self, mine: Said, label: str) -> None:
        """Say it, and wait for nothing. `label` is what a report calls the operation: what the script has called."""
        numbers = torch.tensor(astuple(mine), dtype=torch.int64, device="cpu")
        found = torch.empty_like(numbers)
        self._under_way = found, self._comm.all_reduce_async(numbers, found, ReduceOp.MAX, label=label)

    def read(self, look: Callable[[], None] = lambda: None) -> Said:
        """Wait for every rank, and return what any of them said.

        `look()` is called now and then meanwhile. It raises where another rank will not come, and has told so.
        """
        assert self._under_way is not None, "it was posted"
        found, work = self._under_way
        while not work.done():
            try:
                work.wait(_LOOK_SECONDS)
            except comm_core.TimeoutError:
                look()
        work.wait()
        return Said(*map(bool, found.tolist()))
