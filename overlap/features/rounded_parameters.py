"""Keeps exact values of parameters that are used and sent rounded to 16 bits.

    step()    the user's optimizer updates `values`, this rank's shard, exactly     pack(): rounded into `wire`
    gather    `wire` of all ranks
    arrival   land(): `wire` becomes the parameters, on its owner too

[Note: who sets a parameter sets its master] A script may write to parameters between steps, in ways that nobody notices
(``.data``). An element that is not the rounded master any more was written to, so :meth:`Master.follow`, before each
update, takes the parameter's value for it. A master that is not known is NaN, which is nobody's rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from overlap.core.bucket import Slot
from overlap.core.feature import Feature
from overlap.transport.cuda import streams
from overlap.transport.native import differ

__all__ = ["Master", "RoundedParameters", "check_gather_dtype"]

_WIRES = (torch.bfloat16, torch.float16)
_EXACT = (torch.float32, torch.float64)
_SEGMENT = 2**17  # elements that are compared while they are in the cache


class RoundedParameters(Feature):
    """Checks parameters that are added or converted later: whether they can be sent as `dtype`."""

    def __init__(self, dtype: torch.dtype, optimizer: torch.optim.Optimizer) -> None:
        self._dtype, self._optimizer = dtype, optimizer

    def admit(self, slots: Sequence[Slot]) -> None:
        named = ((slot.name, slot.param) for slot in slots)
        check_gather_dtype(self._dtype, named, self._optimizer, sharding=True)

    def master(self, parameters: torch.Tensor, own: slice) -> Master:
        """The exact values of a bucket's flat parameters; see :data:`overlap.core.flat_buffer.MakeMaster`."""
        return Master(parameters, own, self._dtype)


class Master:
    """The exact shard `own` of a bucket's flat `parameters`, and the 16-bit buffer in which all shards travel.

    Between steps this rank's part of `wire` is `values` rounded.
    """

    def __init__(self, parameters: torch.Tensor, own: slice, dtype: torch.dtype) -> None:
        self._seen, self._parameters = parameters[own], parameters
        self.values = torch.empty_like(self._seen)
        self.wire = parameters.to(dtype)
        self._rounded = self.wire[own]
        self._difference = torch.empty_like(self.values[:_SEGMENT])
        self.forget()

    def forget(self) -> None:
        """Forget the exact values, which are not known: the parameters count."""
        self.values.fill_(float("nan"))
        self.pack()

    @torch.no_grad()
    def put(self, piece: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the exact values of `piece`, a view of :attr:`values`."""
        start = int(piece.storage_offset() - self.values.storage_offset())
        span = slice(start, start + piece.numel())
        piece.copy_(values)
        self._rounded[span].copy_(self.values[span])

    @torch.no_grad()
    def follow(self) -> None:
        """Take over what was written to the parameters: [Note: who sets a parameter sets its master]."""
        if streams.on_device(self._seen):  # without a look, for which the host would wait
            torch.where(self._rounded == self._seen, self.values, self._seen, out=self.values)
            return
        if self._seen.dtype is torch.float32 and not differ(self._rounded, self._seen):
            return
        for start in range(0, self.values.numel(), _SEGMENT):
            span = slice(start, start + _SEGMENT)
            seen, rounded = self._seen[span], self._rounded[span]
            difference = self._difference[
                : seen.numel()
            ]  # memory that is reused: fresh pages cost more than all of this
            lowest, highest = torch.aminmax(difference.copy_(rounded).sub_(seen))
            if float(lowest) != 0 or float(highest) != 0:  # also where they are NaN
                self.values[span] = torch.where(rounded == seen, self.values[span], seen)

    @torch.no_grad()
    def pack(self) -> None:
        """Round `values` into their place in `wire`."""
        self._rounded.copy_(self.values)

    @torch.no_grad()
    def land(self) -> None:
        """Copy the shards of all ranks, which are in `wire`, into the parameters."""
        self._parameters.copy_(self.wire)


def check_gather_dtype(
    dtype: Any, named: Iterable[tuple[str, torch.Tensor]], optimizer: torch.optim.Optimizer, *, sharding: bool
) -> None:
    """Raise ``ValueError`` or ``TypeError`` where parameters cannot be sent as `dtype`; None sends them as they are."""
    if dtype is None:
        return
    if dtype not in _WIRES:
        raise ValueError(f"gather_dtype should be None, torch.bfloat16 or torch.float16 and is {dtype!r}")
    if not sharding:
        raise ValueError(
            f"gather_dtype={dtype} rounds parameters that are gathered after an update of shards, and here every rank "
            f"updates whole parameters: {type(optimizer).__name__} is not known to work element by element "
            "(elementwise=True promises that it does; per_parameter=True with oss, parameter by parameter), or a "
            "compression of your own needs whole gradients"
        )
    for name, param in named:
        if param.dtype not in _EXACT:
            raise TypeError(
                f"gather_dtype={dtype} keeps exact values beside parameters of float32 or float64, and {name!r} is "
                f"{param.dtype}; convert the model to float32, or leave gather_dtype=None"
            )
