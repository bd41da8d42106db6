"""Small tensors of one operation share a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["Batch", "batches"]

#: Larger tensors gain nothing from sharing, and would be copied twice.
FUSED_BYTES = 256 * 1024


class Batch:
    """Tensors of one dtype in one flat buffer; a single one in its own memory."""

    def __init__(self, tensors: Sequence[torch.Tensor], wire_dtype: torch.dtype) -> None:
        self._tensors = tensors
        self.divisor = 1
        """What a sum has yet to be divided by."""
        if len(tensors) == 1 and tensors[0].dtype is wire_dtype:
            self.flat = tensors[0].view(-1)
        else:
            self.flat = torch.cat([tensor.view(-1) for tensor in tensors]).to(wire_dtype)

    @torch.inference_mode()  # as `scale_`
    def unpack(self) -> None:
        """The tensors get what became of their parts."""
        if self.flat.data_ptr() == self._tensors[0].data_ptr() and len(self._tensors) == 1:
            return
        parts = self.flat.split([tensor.numel() for tensor in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor.view(-1).copy_(part)


def batches(tensors: Sequence[torch.Tensor], wire_dtype: Callable[[torch.dtype], torch.dtype]) -> list[Batch]:
    """Divide `tensors` (contiguous) the same way on every rank: it depends on their dtypes and sizes alone.

    `wire_dtype` says as what each dtype travels.
    """
    shared: dict[torch.dtype, list[torch.Tensor]] = {}
    groups: list[list[torch.Tensor]] = []
    for tensor in tensors:
        if tensor.nbytes > FUSED_BYTES:
            groups.append([tensor])
        else:
            group = shared.get(tensor.dtype)
            if group is None:
                shared[tensor.dtype] = group = []
                groups.append(group)
            group.append(tensor)
    return [Batch(group, wire_dtype(group[0].dtype)) for group in groups]
