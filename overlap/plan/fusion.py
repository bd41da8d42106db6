"""Decides how much to fuse: limits of a bucket, and layers fused within them in the order of their use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parameter import is_lazy

from overlap.plan.partition import BucketSpec, TensorSpec, fuse
from overlap.plan.plan import Facts

__all__ = ["fused_in_order_of_use", "limits", "size_and_device"]

_AUTO_MB = (1.0, 25.0)  # no less than DDP's first bucket has, no more than DeAR's paper takes
_AUTO_BUCKETS = {"cpu": 32, "cuda": 8}

# [Note: how much to fuse]
# What no computation can hide lies at the ends of the model. Backward has to pass the last bucket's layers before the
# first reduce-scatter may begin, and the first bucket's is left over when backward ends; forward starts after the first
# bucket's all-gather, and still has the last bucket's layers before it when the last one ends. Each end costs a bucket's
# share of the step, and each bucket two starts: with 32 of them, which "auto" makes, a few percent each on 1 to 10 Gbit/s.
# On networks where a start costs more than a MB does, `tune=True` finds larger ones. Buckets are equal: where backward and
# the reductions take equally long, a larger one leaves the wire idle by the difference. Buckets that taper towards the ends
# of the model gained nothing measured; large ones in its middle were slower. On a GPU a step takes some tens of ms, and a
# bucket some tenths of a ms of the host that launches everything: a quarter as many, by estimate.


def limits(
    threshold_mb: float | str | None, num_nearby_layers: int | None, nbytes: int, device: str = "cpu"
) -> tuple[float | None, int | None]:
    """The threshold (MB) and the layers per bucket for a model of `nbytes` on that type of device (pure).

    A threshold of 0 means no fusion.

    Raises ``ValueError`` for a text that is not "auto".
    """
    if isinstance(threshold_mb, str):
        if threshold_mb != "auto":
            raise ValueError(f"threshold_mb should be a number of MB, 'auto' or None and is {threshold_mb!r}")
        smallest, largest = _AUTO_MB
        buckets = _AUTO_BUCKETS.get(device, _AUTO_BUCKETS["cuda"])
        return min(max(nbytes / buckets / 2**20, smallest), largest), num_nearby_layers
    if threshold_mb == 0:
        return None, num_nearby_layers or 1
    return threshold_mb, num_nearby_layers


def size_and_device(optimizer: torch.optim.Optimizer) -> tuple[int, str]:
    """The bytes of all parameters that are trained, and the type of their device, for :func:`limits`.

    (0, "cpu") for arguments that the wrapper is going to refuse.
    """
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    params = [param for group in groups for param in group["params"] if param.requires_grad and not is_lazy(param)]
    device = params[0].device.type if params else "cpu"
    nbytes = sum(param.numel() * param.element_size() for param in params)
    return nbytes, "cpu" if device == "meta" else device  # where deferred_init() computes values


def fused_in_order_of_use(
    facts: Facts,
    specs: Sequence[TensorSpec],
    world_size: int,
    *,
    threshold_bytes: float | None,
    num_nearby_layers: int | None,
) -> tuple[BucketSpec, ...]:
    """Fuse layers in the order of their use in forward; buckets in the order of issue, which is the reverse (pure).

    Parameters without a gradient in the first iteration would keep their neighbours' buckets from filling, so they get
    buckets of their own, issued last.
    """
    used = [tuple(index for index in unit if index not in facts.idle) for unit in facts.units]
    idle = [tuple(index for index in unit if index in facts.idle) for unit in facts.units]
    buckets: list[BucketSpec] = []
    for units in (idle, used):
        buckets += fuse(
            [unit for unit in units if unit],
            specs,
            world_size,
            threshold_bytes=threshold_bytes,
            num_nearby_units=num_nearby_layers,
        )
    buckets.reverse()
    return tuple(buckets)
