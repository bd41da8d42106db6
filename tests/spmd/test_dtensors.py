"""A model's parameters as DTensors: those that torch's FSDP2 would hand out, of whatever each rank holds; and back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import co2
import dear
import fsdp
from tests.spmd.models import double_model
from tests.spmd.strategies import WRAP
from tests.spmd.training import local_loss, values_of
from tests.spmd_plugin import SIZE

STRATEGIES = ("fsdp", "dear", "oss")
SEVERAL = pytest.mark.skipif(SIZE == 1, reason="takes several ranks")
WORDS = 101  # neither two, nor three, nor four ranks divide the vocabulary


@pytest.fixture(autouse=True)
def default_group() -> Iterator[None]:
    """One rank has none, unless its script makes it."""
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if mine:
        dist.destroy_process_group()


class Words(torch.nn.Module):
    """Ties, a frozen module, a parameter without dimensions, one of less rows than ranks, another layout, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, 9)
        self.inner = torch.nn.Linear(9, 9)
        self.head = torch.nn.Linear(9, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.shift = torch.nn.Parameter(torch.ones(1, 9))
        self.conv = torch.nn.Conv2d(3, 5, 3)
        self.frozen = torch.nn.Linear(9, 9).requires_grad_(False)
        self.register_buffer("count", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.frozen(torch.tanh(self.inner(x @ self.embedding.weight[:9] + self.shift)))
        pictures = self.conv(x.repeat(1, 12).view(-1, 3, 6, 6)).sum((1, 2, 3))
        return self.head(y) * self.scale + pictures[:, None] * 0.01


def _model(seed: int = 5) -> Words:
    torch.default_generator.manual_seed(seed)
    model = Words().double()
    model.conv.to(memory_format=torch.channels_last)
    return model


def _trained(strategy: str, seed: int = 5, **options: Any) -> tuple[Words, Any]:
    model = _model(seed)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = WRAP[strategy](torch.optim.AdamW(trained, 1e-2), model, **options)
    _train(model, optimizer, range(2))
    return model, optimizer


def _train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        local_loss(model, step).backward()
        optimizer.step()


def _same(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("inside", [False, True], ids=["in shares", "while it is whole"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dtensors_are_the_rows_of_what_the_model_saves(strategy: str, inside: bool) -> None:
    model, optimizer = _trained(strategy)
    expected = copy.deepcopy(model.state_dict())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if inside:
        with dear.whole(model):
            found = dear.dtensor_state_dict(model)
    else:
        found = dear.dtensor_state_dict(model)
    assert list(found) == list(expected)
    for name, value in found.items():
        if name not in parameters:
            assert not isinstance(value, DTensor)
            assert torch.equal(value, expected[name])
            continue
        assert isinstance(value, DTensor)
        assert value.placements == ((Shard(0) if value.dim() else Replicate()),)
        assert value.device_mesh.mesh.tolist() == list(range(SIZE))
        assert (value.shape, value.dtype) == (expected[name].shape, torch.float64)
        assert torch.equal(value.full_tensor(), expected[name]), name
        if value.dim():
            chunks = torch.chunk(expected[name], SIZE)
            assert value.to_local().shape[0] == (len(chunks[dear.rank()]) if dear.rank() < len(chunks) else 0)
    assert found["head.weight"] is found["embedding.weight"]
    _train(model, optimizer, range(2, 4))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_goes_on_as_if_nobody_had_looked(strategy: str) -> None:
    values = []
    for looks in (False, True):
        model, optimizer = _trained(strategy)
        for step in range(2, 5):
            if looks:
                dear.dtensor_state_dict(model)
            _train(model, optimizer, range(step, step + 1))
        values.append(values_of(model))
    for mine, other in zip(*values, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_norms_are_those_of_one_process(strategy: str) -> None:
    model, _optimizer = _trained(strategy)
    expected = model.state_dict()
    for name, value in dear.dtensor_state_dict(model).items():
        if isinstance(value, DTensor):
            orders = (
                [1.0, 2.0, float("inf")] if value.to_local().numel() else [1.0, 2.0]
            )  # torch: no largest one of nothing
            for order in dear.allgather_object(orders)[-1]:
                norm: Any = torch.linalg.vector_norm(value, order)
                torch.testing.assert_close(
                    norm.full_tensor(), torch.linalg.vector_norm(expected[name], order), rtol=1e-12, atol=0.0
                )


@SEVERAL
def test_they_are_as_fsdp2_has_them() -> None:
    model = double_model("Mlp")
    theirs = copy.deepcopy(model)
    fully_shard(theirs)
    optimizer = fsdp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    mine = dear.dtensor_state_dict(model)
    reference = get_model_state_dict(theirs)
    assert list(mine) == list(reference)
    for name, value in reference.items():
        assert type(mine[name]) is type(value)
        if isinstance(value, DTensor):
            assert mine[name].placements == value.placements
            assert mine[name].stride() == value.stride()
            assert torch.equal(mine[name].to_local(), value.to_local())
            assert torch.equal((mine[name] - value).full_tensor(), torch.zeros(value.shape, dtype=value.dtype))
    del optimizer


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_process_loads_what_is_saved_of_them(strategy: str, folder: Path) -> None:
    model, _optimizer = _trained(strategy)
    expected = copy.deepcopy(model.state_dict())
    dcp.save({"model": dear.dtensor_state_dict(model)}, checkpoint_id=folder / "one")
    if dear.rank() == 0:
        alone = _model(6)
        state = {"model": alone.state_dict()}
        dcp.load(state, checkpoint_id=folder / "one", no_dist=True)
        alone.load_state_dict(state["model"])
        _same(alone, expected)
    dear.barrier()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_written_to_them_is_loaded(strategy: str) -> None:
    model, optimizer = _trained(strategy)
    expected = {name: value * 0.5 for name, value in model.state_dict().items()}
    found = dear.dtensor_state_dict(model)
    with torch.no_grad():
        for value in {id(each): each for each in found.values()}.values():
            value.mul_(0.5)
    dear.load_dtensor_state_dict(model, found)
    _same(model, expected)
    _train(model, optimizer, range(2, 3))


def test_a_sharded_model_loads_them_by_itself() -> None:
    """Into frozen modules, too."""
    model, _ = _trained("fsdp")
    expected = copy.deepcopy(model.state_dict())
    found = dear.dtensor_state_dict(model)
    other, optimizer = _trained("fsdp", seed=6)
    other.load_state_dict(found)
    _same(other, expected)
    values = []
    for each in (model, other):
        each.zero_grad()
        values.append(local_loss(each, 7).detach())
    assert torch.equal(*values)
    del optimizer


@SEVERAL
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_dict_of_fsdp2_is_loaded(strategy: str) -> None:
    theirs = double_model("Mlp")
    for parameter in theirs.parameters():
        parameter.data.mul_(0.5)
    expected = copy.deepcopy(theirs.state_dict())
    fully_shard(theirs)
    model = double_model("Mlp")
    optimizer = WRAP[strategy](torch.optim.SGD(model.parameters(), 0.1), model)
    dear.load_dtensor_state_dict(model, theirs.state_dict())
    _same(model, expected)
    theirs.load_state_dict(dear.dtensor_state_dict(model))  # and FSDP2 loads ours
    for name, value in theirs.state_dict().items():
        assert torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, expected[name])
    del optimizer


def test_a_rank_has_one_bucket_whole() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    optimizer = fsdp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, threshold_mb=0)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    there = []
    for bucket in optimizer._engine.unsharder.one_by_one(lambda _bucket: True):
        assert bucket.parameters.there
        there.append(sum(each.parameters.there for each in optimizer.buckets))
    assert there == [1] * 6
    dear.dtensor_state_dict(model[:2])
    dear.dtensor_state_dict(model)


@pytest.mark.parametrize("rounded", ["gather_dtype", "param_dtype"])
def test_values_are_exact_where_passes_use_rounded_ones(rounded: str) -> None:
    torch.default_generator.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.Tanh(), torch.nn.Linear(33, 9))
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3)
    if rounded == "gather_dtype":
        optimizer = fsdp.DistributedOptimizer(optimizer, model, gather_dtype=torch.bfloat16)
    else:
        if not hasattr(torch.Tensor, "grad_dtype"):
            pytest.skip("needs a newer torch")
        fsdp.fully_shard(model, mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for step in range(4):
        optimizer.zero_grad()
        local_loss(model, step, dtype=torch.float32).backward()
        optimizer.step()
        found = dear.dtensor_state_dict(model)
        for name, value in model.state_dict().items():
            assert value.dtype is found[name].dtype is torch.float32
            assert torch.equal(found[name].full_tensor(), value)
            assert not torch.equal(value, value.bfloat16().float())


def test_of_a_compiled_model_and_one_without_an_optimizer() -> None:
    model = _model()
    expected = copy.deepcopy(model.state_dict())
    compiled: Any = torch.compile(model)
    found = dear.dtensor_state_dict(compiled)
    assert list(found) == list(expected)
    other: Any = torch.compile(_model(6))
    dear.load_dtensor_state_dict(other, found)
    _same(other._orig_mod, expected)
    with pytest.raises(RuntimeError, match="Missing key"):
        dear.load_dtensor_state_dict(other, {})
    assert dear.load_dtensor_state_dict(other, {}, strict=False).missing_keys


def test_ranks_with_parameters_of_their_own_are_refused() -> None:
    model = double_model("Mlp")
    optimizer = co2.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    with pytest.raises(ValueError, match="co2's ranks have parameters of their own"):
        dear.dtensor_state_dict(model)
    del optimizer
