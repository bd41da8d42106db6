"""DTensors from one layout to another, and layers whose weights are divided among ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.backend.training import alone, close, fully_shard, loss_of, model_of, parameters_of, sgd, whole_batch
from tests.backend.world import FOUR, fails_before, same_everywhere
from tests.spmd_plugin import RANK, SIZE

try:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
except ImportError:  # their place before torch 2.5
    from torch.distributed._tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

PLACEMENTS: dict[str, Any] = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}


@pytest.mark.parametrize("first", list(PLACEMENTS))
@pytest.mark.parametrize("second", list(PLACEMENTS))
@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (1, 7)], ids=str)
def test_from_one_layout_to_another(first: str, second: str, shape: tuple[int, int]) -> None:
    """Also of rows that ranks do not divide, of which some have none."""
    mesh = init_device_mesh("cpu", (SIZE,))
    whole = torch.arange(shape[0] * shape[1]).reshape(shape).float()
    tensor = distribute_tensor(whole, mesh, [PLACEMENTS[first]])
    moved = tensor.redistribute(mesh, [PLACEMENTS[second]])
    close([moved.full_tensor()], [whole], tolerance=0.0)


@pytest.mark.parametrize("second", list(PLACEMENTS))
@pytest.mark.parametrize("shape", [(8, 4), (5, 3)], ids=str)
def test_partial_sums(second: str, shape: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", (SIZE,))
    whole = torch.arange(shape[0] * shape[1]).reshape(shape).float()
    tensor = DTensor.from_local(whole * (RANK + 1), mesh, [Partial()])
    moved = tensor.redistribute(mesh, [PLACEMENTS[second]])
    close([moved.full_tensor()], [whole * (SIZE * (SIZE + 1) // 2)], tolerance=0.0)


def test_rank_0s_values_are_distributed() -> None:
    mesh = init_device_mesh("cpu", (SIZE,))
    tensor = distribute_tensor(torch.full((8, 4), float(RANK)), mesh, [Shard(0)])
    close([tensor.full_tensor()], [torch.zeros(8, 4)], tolerance=0.0)


@pytest.mark.parametrize("op", ["sum", "max", "mean"])
def test_reductions_of_shards(op: str) -> None:
    mesh = init_device_mesh("cpu", (SIZE,))
    whole = torch.randn(8, 4, dtype=torch.float64)
    found = getattr(distribute_tensor(whole, mesh, [Shard(0)]), op)().full_tensor()
    close([found], [getattr(whole, op)()])


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for parameter in model.parameters():
        gradient: Any = parameter.grad
        found.append(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)
    return found


@pytest.mark.parametrize("sequence", [False, pytest.param(True, marks=fails_before("2.5"))])
def test_tensor_parallel_layers(sequence: bool) -> None:
    """With the sequence divided, too: an all-gather and a reduce-scatter in place of an all-reduce."""
    torch.manual_seed(5)
    model = _Block().double()
    reference = copy.deepcopy(model)
    x = torch.randn(8, 4, 6, dtype=torch.float64)
    expected = reference(x)
    expected.square().mean().backward()
    mesh = init_device_mesh("cpu", (SIZE,))
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Replicate()),
        }
        inputs = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False)
        parallelize_module(model.norm, mesh, inputs)
    else:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    found = model(x)
    close([found.detach()], [expected.detach()])
    found.square().mean().backward()
    close(_gradients(model), _gradients(reference))


@fails_before("2.10")
@FOUR
@pytest.mark.four_ranks
def test_shards_of_divided_layers() -> None:
    """``fully_shard`` along one axis of a mesh, tensor parallelism along the other."""
    model = model_of(2, 6)
    pairs = ([0, 1], [2, 3])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    batches = [[whole_batch(step, ranks) for ranks in pairs] for step in range(3)]
    expected = alone(model)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = sgd(model.parameters())
    for both in batches:
        optimizer.zero_grad()
        loss_of(model, both[RANK // 2]).backward()
        optimizer.step()
    close(parameters_of(model), expected)
    same_everywhere(parameters_of(model))
