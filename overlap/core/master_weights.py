"""The interface of exact parameters behind rounded ones; `overlap.features.rounded_parameters` implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from overlap.core.buckets.flat_buffer import FlatBuffer

__all__ = ["MakeMaster", "MasterWeights"]


class MasterWeights(Protocol):
    """The exact shard of a bucket whose parameters travel, and are used, rounded to 16 bits."""

    values: torch.Tensor  # exact: what an update writes to
    wire: torch.Tensor  # all ranks' shards, as they travel
    packed: torch.Tensor  # this rank's: in `wire`, or beside `values` where these are offloaded
    buffer: FlatBuffer | None  # of a freed bucket: the memory of `wire`
    used: bool  # parameters of a freed bucket are `wire` itself while passes use them
    told: bool  # the state of the optimizer has `values`, too

    def follow(self) -> None:
        """Before an update, take over what a script has written to the parameters."""

    def pack(self) -> None:
        """After the update, round `values` into this rank's part of `wire`."""

    def land(self) -> None:
        """Make the shards in `wire`, all of which have arrived, the parameters."""

    def put(self, piece: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the exact values of `piece`, a view of `values`."""

    def forget(self) -> None:
        """Forget the exact values, which are not known any more: the parameters are taken instead."""


#: From a bucket's parameters, whether it is freed; None: they travel as they are.
MakeMaster = Callable[[FlatBuffer, bool], MasterWeights | None]
