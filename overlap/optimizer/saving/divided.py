"""A model that may be divided along axes of a mesh: what each rank has of the whole one, and which ranks write it.

A parameter is a part along an axis (:class:`overlap.job.axes.Part`), in another place on each of its ranks. Ranks along
other axes have copies, or shares of one: of those with the same part, the ranks of one optimizer write it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from overlap.job.axes import axes_of
from overlap.job.session import Session
from overlap.optimizer.shares import owners_of, plain, state_of
from overlap.state.boxes import Region
from overlap.state.regions import region_of
from overlap.transport.objects import NotSent, allgather_made

__all__ = [
    "Holding",
    "Own",
    "everyones",
    "holding_of",
    "is_divided",
    "names_of",
    "naming_of",
    "own_of",
    "refuse_several",
    "written_by",
]

T = TypeVar("T")


def _stages(model: torch.nn.Module) -> dict[str, Any]:
    """Modules by name that have some layers of another, and tell what their tensors are called there."""
    return {name: each for name, each in model.named_modules() if hasattr(type(each), "names_in_whole")}


def is_divided(model: torch.nn.Module) -> bool:
    """Whether ranks have different parts of `model`; the same on every rank."""
    return bool(axes_of(model.parameters())) or bool(_stages(model))


def naming_of(model: torch.nn.Module) -> Callable[[str], tuple[str, ...]]:
    """A function that gives the names in the whole model of what `model` has under a name.

    There are several where the whole model has a tensor under names that are not on this rank. A stage of a pipeline tells
    its names, by a method ``names_in_whole(name)``; others are the model's own.
    """
    stages = _stages(model)

    def names(name: str) -> tuple[str, ...]:
        for path, stage in stages.items():
            before = f"{path}." if path else ""
            if name.startswith(before):
                return tuple(plain(before + each) for each in stage.names_in_whole(name[len(before) :]))
        return (plain(name),)

    return names


def names_of(model: torch.nn.Module) -> dict[int, str]:
    """The name of each parameter in the whole model, by id; the first one, where it has several."""
    naming = naming_of(model)
    return {id(parameter): naming(name)[0] for name, parameter in model.named_parameters()}


class Own(NamedTuple):
    """What this rank has under a name in the whole model."""

    key: str  # the name in its own state dict
    value: Any  # the value there, or its share of it
    shown: Any  # in a checkpoint: chunks of a tensor, where this is a part of it


def own_of(model: torch.nn.Module) -> dict[str, Own]:
    """What this rank has of the model, by names in the whole model."""
    from overlap.state.chunks import Chunked
    from overlap.state.sharded_state import chunk_of

    naming, parameters = naming_of(model), dict(model.named_parameters(remove_duplicate=False))
    found = {}
    for key, value in state_of(model, chunk_of).items():
        shown = value
        if key in parameters and not isinstance(value, Chunked):
            region = region_of(parameters[key])
            shown = Chunked.part(value, region) if region.divided and value.shape == region.local else value
        found.update({name: Own(key, value, shown) for name in naming(key)})
    return found


class Holding(NamedTuple):
    """What a rank has of a model."""

    ranks: tuple[int, ...]  # of its optimizers; without any, none
    axes: tuple[tuple[int, ...], ...]  # the ranks along each axis on which it has parts
    regions: Mapping[str, Region | None]  # by names in the whole model, of parameters; None of what is no parameter
    shapes: Mapping[str, tuple[int, ...] | None]  # by these names, of the whole; None of what is no tensor
    optimizers: int
    groups: Sequence[Mapping[str, Any]]  # of all of them, with names


def holding_of(
    model: torch.nn.Module, shells: Sequence[Any], own: Mapping[str, Own], groups: Sequence[Mapping[str, Any]] = ()
) -> Holding:
    """What this rank tells the others. Raises ``ValueError`` where its optimizers are of different ranks."""
    ranks = sorted({tuple(each._engine.participants.ranks) for each in (*shells, *owners_of(model))})
    if len(ranks) > 1:
        raise ValueError(
            f"the model's optimizers have different ranks ({list(ranks[0])} and {list(ranks[1])}), and a checkpoint is of "
            "one model: give them one process set"
        )
    naming = naming_of(model)
    named = [(naming(name), each) for name, each in model.named_parameters(remove_duplicate=False)]
    shown = {name: each.shown for name, each in own.items()}
    return Holding(
        ranks=ranks[0] if ranks else (),
        axes=tuple(axis.ranks for axis in axes_of(model.parameters())),
        regions=dict.fromkeys(own) | {name: region_of(each) for names, each in named for name in names},
        shapes={name: tuple(each.shape) if isinstance(each, torch.Tensor) else None for name, each in shown.items()},
        optimizers=len(shells),
        groups=groups,
    )


def everyones(session: Session, make: Callable[[], T]) -> list[T]:
    """What `make` returns on every rank, in rank order. On every rank of the job; raises on all where one raises."""
    try:
        return allgather_made(session.control, make)
    except NotSent as error:
        raise ValueError(f"rank {error.sender}: {error.reason}") from error


def refuse_several(holdings: Sequence[Holding]) -> None:
    """Raise ``ValueError`` where ranks have parts of several models, or not as many optimizers (pure)."""
    for rank, each in enumerate(holdings):
        if each.optimizers != holdings[0].optimizers:
            raise ValueError(
                f"a checkpoint is of as many optimizers on every rank, and rank 0 gives {holdings[0].optimizers}, and rank "
                f"{rank} {each.optimizers}"
            )
    links = [set(ranks) for each in holdings for ranks in (each.ranks, *each.axes)]
    together, before = {0}, 0
    while len(together) > before:
        before = len(together)
        together.update(*(link for link in links if link & together))
    apart = sorted(set(range(len(holdings))) - together)
    if apart and all(each.ranks for each in holdings):
        raise ValueError(
            f"a checkpoint has one model, and ranks {sorted(together)} and {apart} neither average gradients nor share "
            "parameters: divide a layer along each axis of the mesh but the optimizer's"
        )


def written_by(holdings: Sequence[Holding], rank: int) -> set[str]:
    """The names of what `rank` writes, of which it may have a share (pure).

    Of ranks that have the same part of a parameter, the first optimizer's write; of what is no parameter, the first one.
    """
    first: dict[tuple[str, Region | None], tuple[int, ...]] = {}
    for number, each in enumerate(holdings):
        for name, region in each.regions.items():
            who = _writers(each, region, number)
            first[name, region] = min(first.get((name, region), who), who)
    mine = holdings[rank]
    return {name for name, region in mine.regions.items() if first[name, region] == _writers(mine, region, rank)}


def _writers(holding: Holding, region: Region | None, rank: int) -> tuple[int, ...]:
    return holding.ranks if holding.ranks and region is not None else (rank,)
