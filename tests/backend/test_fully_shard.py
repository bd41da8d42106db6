"""Stock ``fully_shard``: sharded along one axis and along two, freed after forward or kept, with the checkpoints of DCP."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from tests.backend.training import (
    MixedPrecisionPolicy,
    alone,
    close,
    fully_shard,
    loss_of,
    model_of,
    my_batch,
    parameters_of,
    sgd,
    train,
    whole_batch,
)
from tests.backend.world import FOUR, OVER_GLOO, SEVERAL, fails_before, same_everywhere
from tests.spmd_plugin import RANK, SIZE

pytestmark = fails_before("2.7")


def _sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


@pytest.mark.parametrize("reshard", [True, False])
def test_what_one_process_learns(reshard: bool) -> None:
    model = model_of()
    expected = alone(model)
    mesh = init_device_mesh("cpu", (SIZE,))
    _sharded(model, mesh=mesh, reshard_after_forward=reshard)
    train(model, sgd(model.parameters()))
    close(parameters_of(model), expected)


@pytest.mark.parametrize("ahead", [1, 3])
def test_units_that_are_gathered_ahead(ahead: int) -> None:
    model = model_of(5)
    expected = alone(model)
    _sharded(model, mesh=init_device_mesh("cpu", (SIZE,)))
    units: list[Any] = [layer for layer in model if isinstance(layer, nn.Linear)]
    for number, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[number + 1 : number + 1 + ahead])
        unit.set_modules_to_backward_prefetch(units[max(0, number - ahead) : number][::-1])
    train(model, sgd(model.parameters()))
    close(parameters_of(model), expected)


def test_several_backwards_before_a_step() -> None:
    model: Any = model_of()
    reference = copy.deepcopy(model)
    sum(loss_of(reference, whole_batch(step)) for step in range(3)).backward()
    _sharded(model, mesh=init_device_mesh("cpu", (SIZE,)))
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        loss_of(model, my_batch(step)).backward()
    close([p.grad.full_tensor() for p in model.parameters()], [p.grad for p in reference.parameters()])


@fails_before("2.10")
def test_gradients_are_clipped_by_the_norm_of_all() -> None:
    model = model_of()
    reference = copy.deepcopy(model)
    loss_of(reference, whole_batch(0)).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    _sharded(model, mesh=init_device_mesh("cpu", (SIZE,)))
    loss_of(model, my_batch(0)).backward()
    found: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    close([found.full_tensor()], [expected])
    close([p.grad.full_tensor() for p in model.parameters()], [p.grad for p in reference.parameters()])


def test_forward_and_reduction_in_16_bits() -> None:
    model = model_of().float()
    expected = alone(model_of())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _sharded(model, mesh=init_device_mesh("cpu", (SIZE,)), mp_policy=policy)
    optimizer = sgd(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        x, y = my_batch(step)
        loss_of(lambda x: model(x).float(), (x.float(), y.float())).backward()
        optimizer.step()
    close(parameters_of(model), [one.float() for one in expected], tolerance=0.03)


@fails_before("2.8")
@FOUR
@pytest.mark.four_ranks
@pytest.mark.parametrize("reshard", [True, False])
def test_shards_within_replicas(reshard: bool) -> None:
    """HSDP: two replicas of two shards."""
    model = model_of()
    expected = alone(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _sharded(model, mesh=mesh, reshard_after_forward=reshard)
    train(model, sgd(model.parameters()))
    close([one.detach().full_tensor() for one in model.parameters()], expected)  # type: ignore[operator]


@FOUR
@pytest.mark.four_ranks
def test_resharding_to_a_smaller_group() -> None:
    model = model_of()
    expected = alone(model)
    _sharded(model, mesh=init_device_mesh("cpu", (SIZE,)), reshard_after_forward=2)
    train(model, sgd(model.parameters()))
    close(parameters_of(model), expected)


@pytest.mark.skipif(OVER_GLOO, reason="is of the backend dear")
@pytest.mark.skipif(torch.__version__ < "2.9", reason="needs torch 2.9")
@pytest.mark.parametrize("reshard", [True, False])
def test_what_is_sent_beside_computations_is_the_same(reshard: bool) -> None:
    """``dear.backend.overlap()``, also with gradients that add up and where nothing is left to send."""
    overlap = importlib.import_module("dear.backend").overlap
    trained = []
    for hides in (False, True):
        model: Any = model_of(5)
        _sharded(model, mesh=init_device_mesh("cpu", (SIZE,)), reshard_after_forward=reshard)
        if hides:
            overlap(model)
        optimizer = sgd(model.parameters())
        for step in range(4):
            model.set_requires_gradient_sync(step != 1)
            loss_of(model, my_batch(step)).backward()
            if step != 1:
                optimizer.step()
                optimizer.zero_grad()
        trained.append(parameters_of(model))
    close(*trained, tolerance=0.0)


# - Checkpoints


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def test_a_checkpoint_goes_on_where_it_was(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (SIZE,))
    first, second = model_of(), model_of()
    _sharded(first, mesh=mesh)
    optimizer = _adam(first)
    train(first, optimizer, range(2))
    weights, state = get_state_dict(first, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "saved")
    train(first, optimizer, range(2, 4))

    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    _sharded(second, mesh=mesh)
    other = _adam(second)
    weights, state = get_state_dict(second, other)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder / "saved")
    set_state_dict(second, other, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    train(second, other, range(2, 4))
    close(parameters_of(second), parameters_of(first), tolerance=0.0)


@SEVERAL
def test_a_checkpoint_in_the_background(folder: Path) -> None:
    model = model_of()
    _sharded(model, mesh=init_device_mesh("cpu", (SIZE,)))
    saved = {"model": get_model_state_dict(model)}
    before = parameters_of(model)
    future: Any = dcp.async_save(saved, checkpoint_id=folder / "saved")
    future.result()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loaded = {"model": get_model_state_dict(model)}
    dcp.load(loaded, checkpoint_id=folder / "saved")
    set_model_state_dict(model, loaded["model"])
    close(parameters_of(model), before, tolerance=0.0)


def test_rank_0_has_all_of_the_model() -> None:
    model = model_of()
    expected = model.state_dict()
    expected = {name: value.clone() for name, value in expected.items()}
    _sharded(model, mesh=init_device_mesh("cpu", (SIZE,)))
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if RANK == 0:
        assert found.keys() == expected.keys()
        close(list(found.values()), list(expected.values()), tolerance=0.0)
    dist.barrier()


def test_rank_0_gives_the_model_to_all() -> None:
    torch.manual_seed(3)
    given = model_of().state_dict() if RANK == 0 else {}
    model = model_of()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(RANK))
    _sharded(model, mesh=init_device_mesh("cpu", (SIZE,)))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, given, options=options)
    same_everywhere(parameters_of(model))
    close(parameters_of(model), parameters_of(model_of()), tolerance=0.0)
