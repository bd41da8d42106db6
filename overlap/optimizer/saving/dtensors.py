"""A model's state dict with parameters as torch's FSDP2 has them, ``DTensor``, whatever each rank holds of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from overlap.core.bucket import Slot
from overlap.core.engine import Engine
from overlap.job.default_ranks import default_ranks, group_of
from overlap.job.session import current
from overlap.optimizer.distributed import DistributedOptimizer
from overlap.optimizer.shares import owners_of, plain, state_of
from overlap.state.dtensors import as_dtensor, taking_dtensors

__all__ = ["dtensor_state_dict", "load_dtensor_state_dict"]


class _Share(NamedTuple):
    """Stands in a state dict for a parameter of which each rank has a share."""

    engine: Engine
    slot: Slot


def dtensor_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` as torch's FSDP2 has it: parameters as ``torch.distributed.tensor.DTensor``.

    Names are those of ``torch.distributed.checkpoint.state_dict.get_model_state_dict``. Each parameter, also a frozen one,
    is ``Shard(0)`` in torch's chunks of dimension 0, which differ from the shares that ranks keep, over a one-dimensional
    ``DeviceMesh`` of the optimizer's ranks; without an optimizer, of all ranks. One without dimensions, which FSDP2
    refuses, is ``Replicate()``. Buffers and extra state are plain, as they are on this rank. Types and values are those
    of ``model.state_dict()``. Names of one parameter have one DTensor.

    Rows are copies: what is written to them counts once :func:`load_dtensor_state_dict` has taken them. A rank has its rows
    and, while they are made, one bucket of whole parameters.

    On every rank of the optimizer, between ``step()`` and the next forward; inside ``dear.whole(model)``, too. Raises, on
    every rank, ``RuntimeError`` where torch.distributed's default group does not hold all of these ranks, and
    ``ValueError`` for `co2`, whose ranks have values of their own, and for optimizers with different ranks.
    """
    owners = owners_of(model)
    _refuse(owners)
    for each in owners:
        each._engine.policy.refuse("dtensor_state_dict()")
        each._engine.policy.arrive()
        each._engine.transit.arrive_all()
        if each._engine.unsharder.active:
            each._engine.closing.meet("dtensor_state_dict()")
    found = state_of(model, _Share)
    meshes = _Meshes(default_ranks(_comm(owners), "dtensor_state_dict()"))
    rows = {id(slot): made for slot, made in _gathered(owners, found, meshes)}
    known = dict(model.named_parameters(remove_duplicate=False))
    shown: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, _Share):
            shown[plain(name)] = rows[id(value.slot)]
        elif name in known and isinstance(value, torch.Tensor):
            shown[plain(name)] = rows.setdefault(id(known[name]), meshes.cut(value))
        else:
            shown[plain(name)] = value
    return shown


def load_dtensor_state_dict(model: torch.nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True) -> Any:
    """``model.load_state_dict()`` of DTensors: those of :func:`dtensor_state_dict`, or a state dict of torch's FSDP2.

    A parameter is gathered when its module takes it, whatever its mesh and placement, so a rank has the parameters of one
    module whole. Where ``fsdp`` has sharded the model, ``model.load_state_dict()`` itself takes DTensors.

    On every rank, and on every one of the DTensors' meshes, with the same names, between ``step()`` and the next forward.
    Returns and raises what ``model.load_state_dict()`` does.
    """
    own = {plain(name): name for name in state_of(model, _Share)}
    with taking_dtensors(model.modules()):
        return model.load_state_dict({own.get(name, name): value for name, value in state_dict.items()}, strict)


def _refuse(owners: Sequence[Any]) -> None:
    for each in owners:
        if type(each).state_dict is not DistributedOptimizer.state_dict:
            raise ValueError(
                f"{each.strategy.name}'s ranks have parameters of their own, and a DTensor has one value: take "
                "model.state_dict()"
            )
    several = sorted({tuple(each._engine.participants.ranks) for each in owners})
    if len(several) > 1:
        raise ValueError(
            f"the model's optimizers have different ranks ({list(several[0])} and {list(several[1])}), and its DTensors "
            "have one mesh: call dtensor_state_dict() for each part of the model"
        )


def _comm(owners: Sequence[Any]) -> Any:
    return owners[0]._everyone if owners else current().control


def _gathered(owners: Sequence[Any], found: Mapping[str, Any], meshes: _Meshes) -> Any:
    """The slots of shares that are in `found`, each with its DTensor. On every rank."""
    wanted = {id(value.slot) for value in found.values() if isinstance(value, _Share)}
    for unsharder in dict.fromkeys(owner._engine.unsharder for owner in owners):
        for bucket in unsharder.one_by_one(lambda bucket: any(id(each) in wanted for each in bucket.slots)):
            for slot in bucket.slots:
                if id(slot) in wanted:
                    assert slot.freed is not None
                    yield slot, meshes.cut(slot.freed.whole)


class _Meshes:
    """The mesh for each type of device, over `ranks` of the default group."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._made: dict[str, Any] = {}

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of `whole`."""
        kind = whole.device.type
        if kind not in self._made:
            self._made[kind] = _mesh(self._ranks, kind)
        mesh = self._made[kind]
        return as_dtensor(whole, mesh, mesh.get_local_rank())


def _mesh(ranks: Sequence[int], kind: str) -> Any:
    """On every one of the `ranks`."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group_of(ranks), kind)
