"""When parameters are updated, and by whom."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import torch

from overlap.core.wire import returns_slices

__all__ = ["Updates", "feasible"]


class Updates(Enum):
    """What a strategy wishes for; :func:`feasible` says what an optimizer and a compression allow."""

    WHOLE = auto()  # in step(), all of them by every rank
    SHARDED = auto()  # in step(), each shard by its owner, who sends it to the others
    OWNED = auto()  # as SHARDED, with shards that end where parameters do: whole parameters, each by its owner
    EAGER = auto()  # each shard by its owner, in the order of issue while backward still runs: `overlap.features.early`
    DEFERRED = (
        auto()
    )  # after step(), by every rank, bucket by bucket when somebody needs them: `overlap.features.deferred`

    @property
    def in_shards(self) -> bool:
        """Whether buckets hold parameters, of which a rank owns a shard."""
        return self in (Updates.SHARDED, Updates.OWNED, Updates.EAGER)


def feasible(
    wished: Updates,
    optimizer: torch.optim.Optimizer,
    elementwise: bool,
    compression: Any,
    *,
    per_parameter: bool = False,
) -> Updates:
    """`wished`, or whole updates where the optimizer needs more than its shard or the wire whole tensors (pure).

    Raises ``ValueError`` instead for ``EAGER``, which the user asked for.
    """
    if wished is Updates.EAGER and not elementwise:
        raise ValueError(
            f"eager=True needs an optimizer that works element by element; {type(optimizer).__name__} is not known to "
            "(elementwise=True promises that it does)"
        )
    if wished is Updates.EAGER and not returns_slices(compression):
        raise ValueError(f"eager=True updates shards, and {compression!r} gives whole tensors; use Compression.fp16")
    divisible = per_parameter if wished is Updates.OWNED else elementwise
    possible = divisible and (returns_slices(compression) or not wished.in_shards)
    return wished if possible else Updates.WHOLE
