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
from overlap.core.buckets.flat_buffer import FlatBuffer
from overlap.core.feature import Feature
from overlap.transport.cuda import streams
from overlap.transport.cuda.memory import pinned
from overlap.transport.native import differ

__all__ = ["Master", "RoundedParameters", "check_gather_dtype"]

_WIRES = (torch.bfloat16, torch.float16)
_EXACT = (torch.float32, torch.float64)
_SEGMENT = 2**17  # elements that are compared while they are in the cache


class RoundedParameters(Feature):
    """Checks parameters that are added or converted later: whether they can be sent as `dtype`.

    With `used`, those of freed buckets are also computed with in that type.
    """

    def __init__(self, dtype: torch.dtype, optimizer: torch.optim.Optimizer, *, used: bool = False) -> None:
        self._dtype, self._optimizer, self._used = dtype, optimizer, used

    def admit(self, slots: Sequence[Slot]) -> None:
        self.check(slots, sharding=True)

    def check(self, slots: Sequence[Slot], *, sharding: bool) -> None:
        """Raise where parameters cannot be sent rounded, as :func:`check_gather_dtype`."""
        named = ((slot.name, slot.param) for slot in slots if not (self._used and slot.param.dtype is self._dtype))
        what = "param_dtype" if self._used else "gather_dtype"
        check_gather_dtype(self._dtype, named, self._optimizer, sharding=sharding, what=what)

    def master(self, parameters: FlatBuffer, freed: bool) -> Master | FreedMaster | None:
        """The exact values of a bucket's `parameters`; see :data:`overlap.core.master_weights.MakeMaster`."""
        if freed:
            same = parameters.whole.dtype is self._dtype
            return None if same else FreedMaster(parameters, self._dtype, used=self._used)
        return Master(parameters.whole, parameters.own, self._dtype)


class _Rounded:
    """Exact `values` of a shard, and their place in `wire`, in which the rounded shards of all ranks travel."""

    values: torch.Tensor
    wire: torch.Tensor
    packed: torch.Tensor  # this rank's part of `wire`
    _parameters: torch.Tensor  # whole

    def _span(self, piece: torch.Tensor) -> slice:
        """Where `piece`, a view of :attr:`values`, lies in it."""
        start = int(piece.storage_offset() - self.values.storage_offset())
        return slice(start, start + piece.numel())

    @torch.no_grad()
    def pack(self) -> None:
        """Round `values` into their place in `wire`."""
        self.packed.copy_(self.values)

    @torch.no_grad()
    def land(self) -> None:
        """Copy the shards of all ranks, which are in `wire`, into the parameters."""
        self._parameters.copy_(self.wire)


class Master(_Rounded):
    """The exact shard `own` of a bucket's flat `parameters`, and the 16-bit buffer in which all shards travel.

    Between steps this rank's part of `wire` is `values` rounded.
    """

    buffer: FlatBuffer | None = None
    used, told = False, True

    def __init__(self, parameters: torch.Tensor, own: slice, dtype: torch.dtype) -> None:
        self._seen, self._parameters = parameters[own], parameters
        self.values = torch.empty_like(self._seen)
        self.wire = parameters.to(dtype)
        self.packed = self.wire[own]
        self._difference = torch.empty_like(self.values[:_SEGMENT])
        self.forget()

    def forget(self) -> None:
        """Forget the exact values, which are not known: the parameters count."""
        self.values.fill_(float("nan"))
        self.pack()

    @torch.no_grad()
    def put(self, piece: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the exact values of `piece`, a view of :attr:`values`."""
        span = self._span(piece)
        piece.copy_(values)
        self.packed[span].copy_(self.values[span])

    @torch.no_grad()
    def follow(self) -> None:
        """Take over what was written to the parameters: [Note: who sets a parameter sets its master]."""
        if streams.on_device(self._seen):  # without a look, for which the host would wait
            torch.where(self.packed == self._seen, self.values, self._seen, out=self.values)
            return
        if self._seen.dtype is torch.float32 and not differ(self.packed, self._seen):
            return
        for start in range(0, self.values.numel(), _SEGMENT):
            span = slice(start, start + _SEGMENT)
            seen, rounded = self._seen[span], self.packed[span]
            difference = self._difference[
                : seen.numel()
            ]  # memory that is reused: fresh pages cost more than all of this
            lowest, highest = torch.aminmax(difference.copy_(rounded).sub_(seen))
            if float(lowest) != 0 or float(highest) != 0:  # also where they are NaN
                self.values[span] = torch.where(rounded == seen, self.values[span], seen)


class FreedMaster(_Rounded):
    """The exact shard of a freed bucket's `parameters`, which are gathered rounded to `dtype`.

    The shard is what the bucket keeps anyway: exact values are the parameters', and rounded ones last for a pass. With
    `used`, parameters are the rounded values while they are whole; else those are widened.
    """

    def __init__(self, parameters: FlatBuffer, dtype: torch.dtype, *, used: bool) -> None:
        whole, own = parameters.whole, parameters.own
        self.used, self.told = used, not used
        buffer = FlatBuffer(parameters.spec, own, dtype, whole.device, freed=True)
        self.buffer: FlatBuffer | None = buffer  # freed by its bucket, once it has tensors over it
        self.values, self.wire, self._parameters = parameters.shard, buffer.whole, whole
        self.packed = buffer.shard
        if parameters.offloaded:
            self.packed = pinned(self.values.numel(), dtype, whole.device)
        self._given: torch.Tensor | None = None  # exact values that were loaded, until the next update

    def forget(self) -> None:
        """The parameters count."""
        self._given = None

    @torch.no_grad()
    def put(self, piece: torch.Tensor, values: torch.Tensor) -> None:
        """Exact values of `piece`, a view of :attr:`values`: they count where rounding them gives the parameter.

        The parameters may be loaded before them, or until the next update.
        """
        if self._given is None:
            self._given = torch.full_like(self.values, float("nan"))
        span = self._span(piece)
        self._given.as_strided(piece.shape, piece.stride(), span.start).copy_(values)
        self._take(span)

    @torch.no_grad()
    def follow(self) -> None:
        """Take over exact values that were loaded before their parameters."""
        if self._given is not None:
            self._take(slice(0, self.values.numel()))
            self._given = None

    def _take(self, span: slice) -> None:
        assert self._given is not None
        given, values = self._given[span], self.values[span]
        values.copy_(torch.where(given.to(self.wire.dtype) == values, given, values))


def check_gather_dtype(
    dtype: Any,
    named: Iterable[tuple[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    *,
    sharding: bool,
    what: str = "gather_dtype",
) -> None:
    """Raise ``ValueError`` or ``TypeError`` where parameters cannot be sent as `dtype`; None sends them as they are.

    `what` the argument is called.
    """
    if dtype is None:
        return
    if dtype not in _WIRES:
        raise ValueError(f"{what} should be None, torch.bfloat16 or torch.float16 and is {dtype!r}")
    if not sharding:
        raise ValueError(
            f"{what}={dtype} rounds parameters that are gathered after an update of shards, and here every rank "
            f"updates whole parameters: {type(optimizer).__name__} is not known to work element by element "
            "(elementwise=True promises that it does; per_parameter=True with oss or fsdp, parameter by parameter), or a "
            "compression of your own needs whole gradients"
        )
    for name, param in named:
        if param.dtype not in _EXACT:
            raise TypeError(
                f"{what}={dtype} keeps exact values beside parameters of float32 or float64, and {name!r} is "
                f"{param.dtype}; convert the model to float32, or leave {what}=None"
            )
