"""Named axes over the ranks: every strategy averages gradients along one of them alone, and collectives go along it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import dear
import fsdp
from overlap.horovod.controller.enqueue import runtime
from overlap.transport.objects import SignatureMismatch
from tests.spmd.models import double_model
from tests.spmd.strategies import OF_SETS, OPTIMIZERS, WRAP
from tests.spmd.training import assert_close, local_loss, same_everywhere, values_of
from tests.spmd_plugin import SIZE

TENSOR = 2 if SIZE == 4 else 1  # 2 × 2 of four ranks; all are along "data" elsewhere
DATA = SIZE // TENSOR
SEVERAL = pytest.mark.skipif(SIZE == 1, reason="one rank has no others")

pytestmark = pytest.mark.usefixtures("sets_of_a_test")


def _registered() -> list[dear.ProcessSet]:
    return list(runtime()._registered.values())


def _mesh() -> dear.Mesh:
    return dear.Mesh(data=DATA, tensor=-1)


def _replica() -> int:
    """Ranks along "data" have one model, and others have others."""
    return dear.rank() % TENSOR


def test_a_mesh_knows_where_this_rank_is() -> None:
    mesh, me = _mesh(), dear.rank()
    assert mesh.axes == ("data", "tensor")
    assert dict(mesh.shape) == {"data": DATA, "tensor": TENSOR}
    assert dict(mesh.coordinate) == {"data": me // TENSOR, "tensor": me % TENSOR}
    assert (mesh.size(), mesh.size("data", "data"), mesh.size("data", "tensor")) == (SIZE, DATA, SIZE)
    assert mesh.ranks("data") == tuple(range(me % TENSOR, SIZE, TENSOR))
    assert mesh.ranks("tensor") == tuple(range(me - me % TENSOR, me - me % TENSOR + TENSOR))
    assert mesh.ranks() == mesh.ranks("tensor", "data") == tuple(range(SIZE))
    axis = mesh["data"]
    assert (axis.axes, dict(axis.shape), axis.size()) == (("data",), {"data": DATA}, DATA)
    assert axis.ranks() == axis.ranks("data") == mesh.ranks("data")
    assert dict(axis.coordinate) == {"data": me // TENSOR}
    with pytest.raises(ValueError, match="no axis 'tensor': its axes are data"):
        axis.ranks("tensor")
    with pytest.raises(ValueError, match="no axis 'model': its axes are data, tensor"):
        mesh.group("model")
    with pytest.raises(ValueError, match="no axis 'model'"):
        mesh["model"]


def test_a_mesh_is_a_value() -> None:
    mesh, twin, other = _mesh(), _mesh(), dear.Mesh(tensor=TENSOR, data=DATA)
    assert mesh == twin
    assert len({mesh, twin, copy.deepcopy(mesh), pickle.loads(pickle.dumps(mesh))}) == 1
    assert mesh != other
    assert mesh["data"] != mesh
    assert mesh["tensor", "data"] == mesh
    assert repr(mesh) == f"Mesh(data={DATA}, tensor={TENSOR})"
    assert repr(mesh["data"]) == f"Mesh(data={DATA}, tensor={TENSOR})['data']"
    with pytest.raises(AttributeError):
        mesh.axes = ("data",)  # type: ignore[misc]
    with pytest.raises(TypeError):
        mesh.shape["data"] = 3  # type: ignore[index]


def test_a_wrong_mesh_is_refused_on_every_rank() -> None:
    with pytest.raises(ValueError, match=f"data=3 × tensor={SIZE} are {3 * SIZE} ranks, and the job has {SIZE}"):
        dear.Mesh(data=3, tensor=SIZE)
    with pytest.raises(ValueError, match="at least 1"):
        dear.Mesh(data=SIZE, tensor=0)
    _mesh().group("data")  # all ranks are at the same place


@SEVERAL
def test_ranks_that_ask_for_different_meshes_are_told() -> None:
    mine = {"data": SIZE, "tensor": 1} if dear.rank() == 0 else {"data": 1, "tensor": SIZE}
    with pytest.raises(SignatureMismatch, match=rf"axes of Mesh\(\) differ .* «data={SIZE}» on rank 0 and «data=1»"):
        dear.Mesh(**mine)
    wrong = {"data": SIZE} if dear.rank() == 0 else {"data": SIZE + 1}
    with pytest.raises(SignatureMismatch):
        dear.Mesh(**wrong)


def test_a_group_is_a_process_set_of_this_rank() -> None:
    mesh, me = _mesh(), dear.rank()
    group = mesh.group("data")
    assert tuple(group.ranks or ()) == mesh.ranks("data")
    assert group.included()
    assert group.size() == DATA
    assert mesh.group("data") is group
    assert _mesh()["data"].group() is group
    assert dear.allreduce(torch.tensor([float(me)]), op=dear.Sum, process_set=group).item() == sum(mesh.ranks("data"))
    assert dear.allgather(torch.tensor([me]), process_set=mesh.group("tensor")).tolist() == list(mesh.ranks("tensor"))
    assert mesh.group() is mesh.group("data", "tensor") is dear.global_process_set


@SEVERAL
def test_a_set_that_a_script_removes_is_made_again() -> None:
    mesh = dear.Mesh(data=1, tensor=SIZE)
    first = mesh.group("data")
    for rank in range(SIZE):
        members = [each for each in _registered() if each.ranks == [rank]]
        assert len(members) == 1
        dear.remove_process_set(members[0])
    assert first.process_set_id is None
    second = mesh.group("data")
    assert second is not first
    assert dear.allreduce(torch.tensor([1.0 + dear.rank()]), process_set=second).item() == 1.0 + dear.rank()


@SEVERAL
def test_torchs_device_mesh_has_the_same_axes() -> None:
    mesh = _mesh()
    found = mesh.device_mesh()
    assert found.mesh_dim_names == mesh.axes
    assert tuple(found.mesh.shape) == tuple(mesh.shape.values())
    assert tuple(found.get_coordinate() or ()) == tuple(mesh.coordinate.values())
    assert torch.distributed.get_process_group_ranks(found.get_group("data")) == list(mesh.ranks("data"))
    axis = mesh["data"].device_mesh()
    assert (axis.ndim, axis.mesh.tolist()) == (1, list(mesh.ranks("data")))


@pytest.mark.skipif(SIZE > 1, reason="several ranks have a default group")
def test_a_device_mesh_needs_torchs_default_group() -> None:
    if not torch.distributed.is_initialized():
        with pytest.raises(RuntimeError, match=r"as rank 0 of 1, and there is none: let init\(\) make it"):
            dear.Mesh(data=1).device_mesh()


def _twins(seed: int = 0) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Of this rank's replica: others have other values."""
    models = double_model("Mlp"), double_model("Mlp")
    for model in models:
        for parameter in model.parameters():
            parameter.data.mul_(1.0 + 0.25 * _replica())
    if dear.rank() // TENSOR > 0:  # the first one of each group gives its values
        for parameter in models[0].parameters():
            parameter.data.mul_(0.5)
    return models


def _train(mesh: dear.Mesh, mine: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        local_loss(mine, step).backward()
        optimizer.step()


def _train_alone(mesh: dear.Mesh, alone: torch.nn.Module, reference: Any, steps: range) -> None:
    """With the data of all ranks of the replica."""
    for step in steps:
        reference.zero_grad()
        for rank in mesh.ranks("data"):
            (local_loss(alone, step, rank) / DATA).backward()
        reference.step()


def _check(strategy: str, make: str, steps: int = 3) -> None:
    """Equal to one process for each replica, which gets the data of its ranks."""
    mesh = _mesh()
    mine, alone = _twins()
    reference = OPTIMIZERS[make](list(alone.parameters()))
    optimizer = WRAP[strategy](OPTIMIZERS[make](list(mine.parameters())), mine, process_set=mesh.group("data"))
    _train(mesh, mine, optimizer, range(steps))
    _train_alone(mesh, alone, reference, range(steps))
    assert_close(mine.state_dict(), alone.state_dict(), "model")
    assert_close(optimizer.state_dict()["state"], reference.state_dict()["state"], "optimizer")


@pytest.mark.parametrize("make", ["sgd", "adamw"])
@pytest.mark.parametrize("strategy", OF_SETS)
def test_gradients_are_averaged_along_one_axis(strategy: str, make: str) -> None:
    _check(strategy, make)


@pytest.mark.parametrize("strategy", OF_SETS)
def test_replicas_are_models_of_their_own(strategy: str) -> None:
    """As the parts of one that is split along another axis: of other shapes, with another optimizer, and other steps."""
    mesh, number = _mesh(), _replica()
    torch.default_generator.manual_seed(number)
    layers = (torch.nn.Linear(9, 9) for _ in range(3 + 2 * number))
    mine = torch.nn.Sequential(*layers).double()
    alone, make = copy.deepcopy(mine), "adamw" if number else "sgd"
    reference = OPTIMIZERS[make](list(alone.parameters()))
    optimizer = WRAP[strategy](OPTIMIZERS[make](list(mine.parameters())), mine, process_set=mesh.group("data"))
    steps = range(3 + 2 * number)
    _train(mesh, mine, optimizer, steps)
    _train_alone(mesh, alone, reference, steps)
    assert_close(mine.state_dict(), alone.state_dict(), "model")


@pytest.mark.parametrize("strategy", ["dear", "fsdp", "wfbp"])
def test_a_norm_is_that_of_the_replica(strategy: str) -> None:
    mesh, (mine, alone) = _mesh(), _twins()
    optimizer = WRAP[strategy](OPTIMIZERS["sgd"](list(mine.parameters())), mine, process_set=mesh.group("data"))
    local_loss(mine).backward()
    for rank in mesh.ranks("data"):
        (local_loss(alone, 0, rank) / DATA).backward()
    norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (mine, alone)]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-10, atol=0.0)
    optimizer.step()


def _sharded() -> tuple[dear.Mesh, torch.nn.Module, Any, torch.nn.Module]:
    mesh = _mesh()
    mine, alone = _twins()
    optimizer = fsdp.DistributedOptimizer(
        OPTIMIZERS["sgd"](list(mine.parameters())), mine, process_set=mesh.group("data"), threshold_mb=0.001
    )
    _train(mesh, mine, optimizer, range(2))
    _train_alone(mesh, alone, OPTIMIZERS["sgd"](list(alone.parameters())), range(2))
    return mesh, mine, optimizer, alone


def test_a_rank_keeps_its_share_of_its_replica() -> None:
    _, mine, optimizer, alone = _sharded()
    held = sum(bucket.parameters.shard.numel() for bucket in optimizer.buckets)
    numel = sum(value.numel() for value in alone.parameters())
    assert numel / DATA - len(optimizer.buckets) <= held <= 1.1 * numel / DATA + len(optimizer.buckets)
    if dear.rank() == SIZE - 1:  # the others need not ask
        assert_close(mine.state_dict(), alone.state_dict(), "model")
    with dear.whole(mine), torch.no_grad():
        assert_close([value.detach() for value in mine.parameters()], [*alone.parameters()], "whole")
        for value in mine.parameters():
            value.mul_(0.5)
    assert_close(values_of(mine), [value.detach() * 0.5 for value in alone.parameters()], "halved")


def test_a_replica_loads_what_it_saved() -> None:
    mesh, mine, optimizer, _ = _sharded()
    saved, state = copy.deepcopy(mine.state_dict()), copy.deepcopy(optimizer.state_dict())
    _train(mesh, mine, optimizer, range(2, 4))
    after = values_of(mine)
    mine.load_state_dict(saved)
    optimizer.load_state_dict(state)
    _train(mesh, mine, optimizer, range(2, 4))
    for value, expected in zip(values_of(mine), after, strict=True):
        assert torch.equal(value, expected)


def test_weights_in_files_are_those_of_rank_0s_replica(folder: Path) -> None:
    _, mine, _, alone = _sharded()
    dear.save_pretrained(mine, folder)
    dear.load_pretrained(mine, folder)
    first = dear.broadcast_object([value.detach() for value in alone.parameters()])
    assert_close(values_of(mine), first, "loaded")


@pytest.mark.skipif(TENSOR == 1, reason="all ranks have one model")
def test_sharded_checkpoints_of_some_ranks_are_refused(folder: Path) -> None:
    _, mine, optimizer, _ = _sharded()
    dear.save_checkpoint(folder, double_model("Mlp"))
    for call in (dear.save_checkpoint, dear.load_checkpoint):
        with pytest.raises(ValueError, match=rf"by all {SIZE} ranks of the job, and .* a process set of {DATA}"):
            call(folder, mine, optimizer)
    with pytest.raises(ValueError, match="process set"):
        dear.sharded_state_dict(mine, optimizer)


def test_a_deferred_model_gets_the_values_of_its_replica() -> None:
    mesh = _mesh()
    torch.default_generator.manual_seed(dear.rank())
    with dear.deferred_init():
        mine = torch.nn.Sequential(*(torch.nn.Linear(9, 9) for _ in range(3)))
    torch.default_generator.manual_seed(mesh.ranks("data")[0])
    alone = torch.nn.Sequential(*(torch.nn.Linear(9, 9) for _ in range(3)))
    fsdp.DistributedOptimizer(torch.optim.SGD(mine.parameters(), 0.1), mine, process_set=mesh.group("data"))
    for value, expected in zip(values_of(mine), alone.parameters(), strict=True):
        assert torch.equal(value, expected)


def _meshes(kind: str) -> Any:
    mesh = _mesh()
    return mesh["data"] if kind == "dear" else mesh.device_mesh()["data"]


@pytest.mark.parametrize("reshard", [None, True, False, 1, DATA])
@pytest.mark.parametrize("kind", ["dear", pytest.param("torch", marks=SEVERAL)])
def test_fully_shard_takes_an_axis(kind: str, reshard: bool | int | None) -> None:
    mesh, (mine, alone) = _mesh(), _twins()
    options: dict[str, Any] = {"mesh": _meshes(kind), "reshard_after_forward": reshard}
    for module in dict(mine.named_children())["inner"].children():
        fsdp.fully_shard(module, **options)
    fsdp.fully_shard(mine, **options)
    optimizer: Any = OPTIMIZERS["adamw"](list(mine.parameters()))
    _train(mesh, mine, optimizer, range(3))
    _train_alone(mesh, alone, OPTIMIZERS["adamw"](list(alone.parameters())), range(3))
    assert_close(mine.state_dict(), alone.state_dict(), "model")
    held = sum(bucket.parameters.shard.numel() for bucket in optimizer.buckets)
    numel = sum(value.numel() for value in alone.parameters())
    assert numel / DATA - len(optimizer.buckets) <= held <= 1.1 * numel / DATA + len(optimizer.buckets)


def test_fully_shard_takes_a_mesh_of_one_axis_or_of_two() -> None:
    for mesh in (dear.Mesh(ranks=-1), _mesh()):
        model = fsdp.fully_shard(torch.nn.Linear(9, 9), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(1, 9)).sum().backward()
        optimizer.step()
        same_everywhere(model.state_dict()["weight"])
    with pytest.raises(
        ValueError, match=r"shape \(\d, 1, 1\): parameters are sharded along one axis, and may be replicated"
    ):
        fsdp.fully_shard(torch.nn.Linear(9, 9), mesh=dear.Mesh(data=-1, tensor=1, pipeline=1))


@SEVERAL
def test_meshes_that_do_not_fit_together_are_refused_on_every_rank() -> None:
    whole, each = dear.Mesh(ranks=-1), dear.Mesh(data=SIZE, one=1)["one"]
    model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, 9))
    fsdp.fully_shard(model[0], mesh=whole)
    fsdp.fully_shard(model, mesh=each)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(NotImplementedError, match="mesh differs between modules"):
        model(torch.ones(1, 9))
    del optimizer
    other = fsdp.fully_shard(torch.nn.Linear(9, 9), mesh=whole if dear.rank() == 0 else each)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    with pytest.raises(ValueError, match=rf"rank 0 shards over ranks \{list(range(SIZE))} and rank 1 over \[1\]: all"):
        other(torch.ones(1, 9))
    last = fsdp.fully_shard(torch.nn.Linear(9, 9), mesh=DeviceMesh("cpu", [0]))
    optimizer = torch.optim.SGD(last.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"rank 1 is not among the ranks \[0\] of the mesh"):
        last(torch.ones(1, 9))
    del optimizer
