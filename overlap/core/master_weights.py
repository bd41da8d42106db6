"""Exact parameters behind a bucket's rounded ones, as core sees them; `overlap.features.rounded_parameters` has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["MakeMaster", "MasterWeights"]


class MasterWeights(Protocol):
    """The exact shard of a bucket whose parameters travel, and are used, rounded to 16 bits."""

    values: torch.Tensor  # exact: what an update writes to
    wire: torch.Tensor  # all ranks' shards, as they travel

    def follow(self) -> None:
        """Before an update: what a script has written to the parameters counts."""

    def pack(self) -> None:
        """After it: `values`, rounded, into this rank's part of `wire`."""

    def land(self) -> None:
        """Every rank's shard is in `wire`: make them the parameters."""

    def put(self, piece: torch.Tensor, values: torch.Tensor) -> None:
        """Replace `piece`, a view of `values`."""

    def forget(self) -> None:
        """The exact values are not known: the parameters count."""


#: From a bucket's flat parameters, and this rank's shard of them.
MakeMaster = Callable[[torch.Tensor, slice], MasterWeights]
