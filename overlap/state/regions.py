"""Where a parameter that is a part of one of several ranks lies in the whole one."""

from __future__ import annotations

import torch

from overlap.job.axes import part_of
from overlap.state.boxes import Region, Segment, segments

__all__ = ["region_of"]


def region_of(parameter: torch.Tensor) -> Region:
    """Where `parameter` lies in the whole one, by what was noted of it; of one that is no part, all of it."""
    shape = list(parameter.shape)
    dims: list[tuple[Segment, ...]] = [(Segment(0, 0, length),) for length in shape]
    for part in part_of(parameter):
        if part.dim is not None:
            shape[part.dim] = sum(part.lengths)
            dims[part.dim] = segments(part.lengths, part.axis.rank, part.stride)
    return Region(tuple(shape), tuple(dims))
