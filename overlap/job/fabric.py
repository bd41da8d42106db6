"""Finds devices of networks that an MPI library moves bytes over past TCP, which is slower there."""

from __future__ import annotations

from pathlib import Path

__all__ = ["devices"]

# InfiniBand, RoCE and AWS's EFA; Omni-Path; HPE Slingshot. A container that must not use one does not have its device.
_PATTERNS = ("infiniband/uverbs*", "hfi1_[0-9]*", "cxi[0-9]*")


def devices(folder: Path = Path("/dev")) -> list[str]:
    """The names of those of this host."""
    return sorted(str(found.relative_to(folder)) for pattern in _PATTERNS for found in folder.glob(pattern))
