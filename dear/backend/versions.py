"""Which versions of torch the backend runs with. Pure."""

from __future__ import annotations

import re

from comm_core import Unsupported

__all__ = ["is_supported", "require_torch"]

_OLDEST = 2, 7


def is_supported(version: str) -> bool:
    """Whether the backend runs with this `version` of torch.

    Before 2.7, the C++ of torch keeps no reference to the works of a group in Python: what DDP and DTensor wait for is
    gone by then, and they wait forever.
    """
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2]) >= _OLDEST


def require_torch(version: str) -> None:
    """Raise ``Unsupported`` for a `version` of torch that the backend does not run with."""
    if not is_supported(version):
        oldest = ".".join(map(str, _OLDEST))
        raise Unsupported(
            f'the backend "dear" takes torch {oldest} or newer, and this is {version}, with which DDP over it would hang: '
            f"pip install 'torch>={oldest}', or use gloo, or dear.DistributedOptimizer"
        )
