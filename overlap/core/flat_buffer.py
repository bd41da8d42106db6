"""Flat memory for the tensors of a bucket: all of them, and this rank's share."""

from __future__ import annotations

import torch

from overlap.plan.partition import BucketSpec
from overlap.transport.cut_pickles import cut_when_pickled
from overlap.transport.memory import view_like

__all__ = ["FlatBuffer"]


class FlatBuffer:
    """The tensors of a bucket, laid out as `spec` says, in `whole`; the elements `own` of it, which are this rank's, in
    `shard`.

    1-D tensors of one type, zeros at first. `shard` shows the memory of `whole`, unless it is to lie `apart`.
    """

    __slots__ = ("own", "shard", "spec", "whole")

    def __init__(
        self, spec: BucketSpec, own: slice, dtype: torch.dtype, device: torch.device, *, apart: bool = False
    ) -> None:
        self.spec, self.own = spec, own
        self.whole = torch.zeros(spec.padded_numel, dtype=dtype, device=device)
        cut_when_pickled(self.whole)
        self.shard = torch.zeros(own.stop - own.start, dtype=dtype, device=device) if apart else self.whole[own]

    def view(self, place: int, like: torch.Tensor) -> torch.Tensor:
        """The tensor at `place` of the bucket, shaped and laid out as `like`; see :func:`view_like`."""
        return view_like(self.whole, self.spec.offsets[place], like)

    @property
    def there(self) -> bool:
        """Whether `whole` has memory."""
        return self.whole.untyped_storage().nbytes() > 0

    def free(self) -> None:
        """Give back the memory of `whole` until :meth:`restore`. Views of it stay, and nobody may read them."""
        self.whole.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Give `whole` memory of undefined contents, where it has none."""
        if not self.there:
            self.whole.untyped_storage().resize_(self.whole.nbytes)

    def release(self) -> None:
        """Give up the memory, for good."""
        self.whole = self.shard = self.whole.new_empty(0)
