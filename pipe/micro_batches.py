"""Cuts a batch into micro-batches along its first dimension, and puts results together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["cut", "put_together"]


def cut(batch: Any, chunks: int) -> list[Any]:
    """At most so many micro-batches of `batch`: fewer where it has fewer rows, as even as ``torch.chunk`` makes them.

    `batch` is a tensor or any structure of tensors, which are cut alike; what is no tensor goes with each. Raises
    ``TypeError`` for one without a tensor, ``ValueError`` where first dimensions differ or are missing.
    """
    leaves, structure = tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise TypeError(f"a batch is a tensor, or has some; this one is {type(batch).__name__}")
    rows = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    if len(rows) != 1 or None in rows:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"tensors of a batch have one first dimension, along which it is cut; these are {shapes}")
    parts = [
        leaf.chunk(chunks) if isinstance(leaf, torch.Tensor) else (leaf,) * len(tensors[0].chunk(chunks))
        for leaf in leaves
    ]
    return [tree_unflatten(list(each), structure) for each in zip(*parts, strict=True)]


def put_together(results: Sequence[Any]) -> Any:
    """The micro-batches' results as one; what is no tensor is that of the first."""
    flat = [tree_flatten(result) for result in results]
    whole = [
        torch.cat(leaves) if isinstance(leaves[0], torch.Tensor) else leaves[0]
        for leaves in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return tree_unflatten(whole, flat[0][1])
