"""What one rank holds of a model, for checkpoints of a file for each rank, with fairscale's names.

local_state_dict()             each rank: its share of every parameter, 1-D, and what it has whole
local_metadata_dict()          each rank: of which elements these are
consolidate_shard_weights()    anywhere: whole tensors, of what all ranks have saved
load_local_state_dict()        each rank: its own again, at as many ranks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from overlap.job.session import current
from overlap.optimizer.shares import before_loading, plain, state_of
from overlap.state.boxes import dims_in_memory
from overlap.state.chunks import Chunked
from overlap.state.saved import first_few
from overlap.state.sharded_state import chunk_of
from overlap.transport.objects import allgather_object

__all__ = ["consolidate", "load_local", "local_metadata", "local_state"]


def local_state(module: torch.nn.Module) -> dict[str, Any]:
    """By the names of ``state_dict()``, copies of this rank's elements, 1-D, or of all of a tensor that is whole here."""
    found = state_of(module, chunk_of)
    return {
        plain(name): (value.held if isinstance(value, Chunked) else value).detach().clone()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in found.items()
    }


def local_metadata(module: torch.nn.Module) -> dict[str, Any]:
    """Of each parameter: its shape, and of a share the first element and the order of dimensions in memory."""
    parameters = {plain(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    found = {plain(name): value for name, value in state_of(module, chunk_of).items()}
    return {
        "param_metadata": {name: _described(value) for name, value in found.items() if name in parameters},
        "buffer_names": [name for name in found if name not in parameters],
    }


def _described(value: torch.Tensor) -> dict[str, Any]:
    shape = tuple(value.shape)
    if not isinstance(value, Chunked):
        return {"shape": shape, "start": None, "dims": None}  # whole
    return {"shape": shape, "start": value.begin, "dims": tuple(value.dims)}


def consolidate(
    weights: Sequence[Mapping[str, Any]], metadata: Sequence[Mapping[str, Any]], with_buffers: bool, strict: bool
) -> dict[str, Any]:
    """See :meth:`fsdp.FullyShardedDataParallel.consolidate_shard_weights` (pure)."""
    if len(weights) != len(metadata) or not weights:
        raise ValueError(
            f"shard_weights has {len(weights)} entries and shard_metadata {len(metadata)}: give one of each for every rank"
        )
    whole = {}
    for name, first in metadata[0]["param_metadata"].items():
        lacking = [rank for rank, mine in enumerate(weights) if name not in mine]
        if lacking and strict:
            raise KeyError(f"shard_weights of rank {lacking[0]} has no {name!r}; strict=False leaves it out")
        if not lacking:
            whole[name] = _joined(name, first, weights, metadata)
    for name in metadata[0]["buffer_names"] if with_buffers else ():
        if name in weights[0]:
            whole[name] = weights[0][name]
        elif strict:
            raise KeyError(f"shard_weights of rank 0 has no buffer {name!r}; strict=False leaves it out")
    return whole


def _joined(
    name: str, first: Mapping[str, Any], weights: Sequence[Mapping[str, Any]], metadata: Sequence[Mapping[str, Any]]
) -> torch.Tensor:
    if first["start"] is None:
        value: torch.Tensor = weights[0][name]
        return value
    pieces = [
        (each["param_metadata"][name]["start"], mine[name])
        for each, mine in zip(metadata, weights, strict=True)
        if mine[name].numel()
    ]
    pieces.sort(key=lambda piece: piece[0])
    return _whole(name, [values for _, values in pieces], first["shape"], first["dims"])


def _whole(name: str, pieces: Sequence[torch.Tensor], shape: Sequence[int], dims: Sequence[int]) -> torch.Tensor:
    """The tensor of which `pieces` are the elements, in the order of `dims`. Raises ``ValueError`` for another number."""
    count = sum(each.numel() for each in pieces)
    if count != prod(shape):
        raise ValueError(
            f"the shares of {name!r} have {count} elements together, and its shape {tuple(shape)} has {prod(shape)}: give "
            "those of all ranks, each once"
        )
    flat = torch.cat(list(pieces))
    return flat.view([shape[dim] for dim in dims]).permute([list(dims).index(dim) for dim in range(len(dims))])


def load_local(module: torch.nn.Module, state: Mapping[str, Any], strict: bool, ranks: tuple[int, ...]) -> Any:
    """See :meth:`fsdp.FullyShardedDataParallel.load_local_state_dict`. `ranks`: those that share the model."""
    before_loading(module, "load_local_state_dict()")
    names = {plain(name): name for name in state_of(module, chunk_of)}
    own = {plain(name): value for name, value in state_of(module, chunk_of).items()}
    missing, unexpected = [name for name in own if name not in state], [name for name in state if name not in own]
    counts = {name: (_count(state[name]), _count(value)) for name, value in own.items() if name in state}
    control = current().control
    everyones: list[Any] = allgather_object(control, (missing, unexpected, counts))
    for rank, (lacks, more, _) in enumerate(everyones):
        if strict and (lacks or more):
            raise ValueError(
                f"rank {rank} was given a state dict that lacks {first_few(lacks) or 'nothing'} and has "
                f"{first_few(more) or 'nothing'} more: load one that local_state_dict() of this model has given"
            )
    shares = [everyones[rank][2] for rank in ranks]
    ways = {name: _way(name, own[name], state[name], [each[name] for each in shares]) for name in counts}
    apart = [name for name, way in ways.items() if way == "apart"]
    whole = {name: state[name] for name, way in ways.items() if way == "whole"}
    with torch.no_grad():
        for name in (name for name, way in ways.items() if way == "share"):
            own[name].held.copy_(state[name])
        for number in range(max(map(len, allgather_object(control, apart)))):  # all ranks, whichever models they have
            mine = apart[number] if number < len(apart) else None
            found: list[Any] = allgather_object(control, None if mine is None else state[mine].detach())
            if mine is not None:
                whole.update(_put(mine, own[mine], [found[rank] for rank in ranks]))
    module.load_state_dict({names[name]: value for name, value in whole.items()}, strict=False)
    allgather_object(control, None)  # who looks at the model now asks the others for their shares
    return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)


def _count(value: Any) -> int | None:
    return value.numel() if isinstance(value, torch.Tensor) else None


def _way(name: str, own: Any, given: Any, counts: Sequence[tuple[int | None, int | None]]) -> str:
    """How a tensor is loaded: as a "share", as a "whole" one, or "apart": cut in another way than the model is (pure).

    `counts`: of each rank, the elements that it was given and those that it has. The same on all of them.
    """
    total = None if not isinstance(own, torch.Tensor) else prod(own.shape)
    if total is None or all(count == total for count, _ in counts):
        flat = len(counts) == 1 and total is not None and given.shape != own.shape
        return "whole" if not flat else "share" if isinstance(own, Chunked) else "apart"
    if all(count == mine for count, mine in counts):
        return "share"
    if sum(count or 0 for count, _ in counts) != total:
        raise ValueError(
            f"the shares of {name!r} have {[count for count, _ in counts]} elements on {len(counts)} rank(s), and it has "
            f"{total}: load the files of a job of as many ranks, each rank its own, or consolidate_shard_weights() and "
            "load_state_dict()"
        )
    return "apart"


def _put(name: str, own: Any, pieces: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy this rank's part of `pieces` into the share `own`, or return the whole tensor under its name."""
    flat = torch.cat([piece.flatten() for piece in pieces])
    if isinstance(own, Chunked):
        own.held.copy_(flat[own.begin : own.begin + own.held.numel()])
        return {}
    return {name: _whole(name, [flat], own.shape, dims_in_memory(own.stride()))}
