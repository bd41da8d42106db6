"""``check_replicas(model)``: whether all ranks hold the same model."""

from __future__ import annotations

from typing import Any

import torch

from overlap.features.buffers import BroadcastBuffers
from overlap.features.replicas import difference, digests_of, parameters_of, together
from overlap.horovod.functions import allgather_object
from overlap.job.session import current
from overlap.transport.objects import SignatureMismatch

__all__ = ["check_replicas"]

_REMEDY = (
    "a change was made on some ranks only: make it on all, or broadcast_parameters(model.state_dict(), root_rank=0) gives "
    "all of them those of rank 0"
)
_APART = (
    "with co2 replicas differ between averages: call average_parameters() on every rank first, and compare before the next "
    "step"
)


def check_replicas(model: torch.nn.Module) -> None:
    """Compare the parameters of `model` between all ranks, bit for bit, and those buffers that every step makes the same.

    Only digests travel, a few bytes for each rank; a rank reads its whole model once. Parameters that are on their way are
    awaited. Buffers are compared where a distributed optimizer was given the module and has ``broadcast_buffers``, or where
    no distributed optimizer has the parameters; they are the same from ``step()`` to the next forward in training mode.

    On every rank, at any time: as ``allreduce()``, it finds the call of the other ranks by its name. Raises
    ``SignatureMismatch``, a ``ValueError``, on every rank, with the name of the first tensor that differs and the ranks on
    which it does; ``TypeError`` for what is no module; ``RuntimeError`` while ranks have joined. With ``eager=True`` not
    between backward and ``step()``. With ``co2``, replicas differ between averages, so it comes after
    ``average_parameters()``.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"check_replicas() takes a torch.nn.Module and was given {type(model).__name__}")
    optimizers = current().registry.having(list(parameters_of(model).values()))
    for optimizer in optimizers:
        optimizer._engine.policy.refuse("check_replicas()")
        optimizer._engine.transit.arrive_all()
    told = {
        "parameter": digests_of(parameters_of(model)),
        "buffer": digests_of(_alike(model, optimizers)),
    }
    first = allgather_object([together(digests) for digests in told.values()], name="check_replicas")
    if all(each == first[0] for each in first):
        return
    everybodys = allgather_object(told, name="check_replicas, by name")
    for kind in told:
        found = difference({rank: theirs[kind] for rank, theirs in enumerate(everybodys)}, kind)
        if found:
            apart = any(optimizer.strategy.name == "co2" for optimizer in optimizers)
            raise SignatureMismatch(f"{found}; {_APART if apart else _REMEDY}")


def _alike(model: torch.nn.Module, optimizers: list[Any]) -> dict[str, torch.Tensor]:
    """Buffers that should be the same on all ranks."""
    if not optimizers:
        return dict(model.named_buffers())
    known = [
        feature for each in optimizers for feature in each._engine.features if isinstance(feature, BroadcastBuffers)
    ]
    theirs = {id(buffer) for feature in known for buffer in feature.alike()}
    return {name: buffer for name, buffer in model.named_buffers() if id(buffer) in theirs}
