"""Linear layers in slices: values, names and results of the whole layer, and less that is whole at a time."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import dear
import osdp
from osdp.slices import splittable
from tests.spmd_plugin import SIZE

WIDTH, WORDS = 32, 1021


def _model() -> torch.nn.Sequential:
    torch.default_generator.manual_seed(6)
    layers = [part for _ in range(4) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, WORDS))


def _loss(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, words = torch.randn(6, WIDTH, generator=generator), torch.randint(WORDS, (6,), generator=generator)
    return torch.nn.functional.cross_entropy(model(x), words)


def _trained(strategy: str | None, slices: dict[str, int], **options: Any) -> tuple[dict[str, torch.Tensor], Any, Any]:
    model = _model()
    osdp.split(model, slices)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
    ranks = range(SIZE)
    if strategy is not None:
        optimizer = dear.DistributedOptimizer(optimizer, model, strategy=strategy, threshold_mb=0, **options)
        ranks = range(dear.rank(), dear.rank() + 1)
    for step in range(6):
        optimizer.zero_grad()
        for rank in ranks:
            (_loss(model, step, rank) / len(ranks)).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}, optimizer, model


def test_results_are_those_of_the_whole_layer() -> None:
    mine, optimizer, model = _trained("osdp", {"8": 4}, memory_limit_gb=64.0)
    buckets = {bucket.slots[0].name.rpartition(".")[0]: bucket.nbytes for bucket in optimizer.buckets}
    assert max(buckets.values()) < WIDTH * WORDS * 4 / 3
    assert {f"8.slices.{number}" for number in range(4)} < set(buckets)
    expected, _, _ = _trained(None, {})
    assert list(mine) == list(expected)
    for strategy in ("dear", "osdp"):
        whole = _trained(strategy, {}, **({"memory_limit_gb": 64.0} if strategy == "osdp" else {}))[0]
        for name, value in whole.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    model.load_state_dict(expected)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])


def test_values_and_names_are_those_of_the_whole_layer() -> None:
    model, whole = _model(), _model()
    osdp.split(model, {"8": 3})
    assert isinstance(model[8], osdp.SlicedLinear)
    assert [len(part.weight) for part in model[8].slices] == [341, 340, 340]
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        saved = other.state_dict()
        assert list(saved) == list(whole.state_dict())
        assert all(torch.equal(saved[name], value) for name, value in whole.state_dict().items())
        other.load_state_dict({name: value + 1 for name, value in saved.items()})
        assert torch.equal(other.state_dict()["8.bias"], whole[8].bias + 1)
    x = torch.randn(2, 3, WIDTH)
    torch.testing.assert_close(model[8](x), whole[8](x) + x.sum(-1, keepdim=True) + 1, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match=r"size mismatch|Missing key"):
        model.load_state_dict({**whole.state_dict(), "8.weight": torch.zeros(7, WIDTH)})


def test_what_cannot_be_split() -> None:
    tied = torch.nn.ModuleDict({"embed": torch.nn.Embedding(9, 4), "head": torch.nn.Linear(4, 9, bias=False)})
    tied["head"].weight = tied["embed"].weight
    assert list(splittable(tied)) == []
    for name, why in (("head", "no torch.nn.Linear with a weight of its own"), ("neck", "is not there")):
        with pytest.raises(ValueError, match=why):
            osdp.split(tied, {name: 2})
    for count in (1, WORDS + 1):
        with pytest.raises(ValueError, match=f"{count} should be 2 or more, and at most the layer's {WORDS}"):
            osdp.split(_model(), {"8": count})


def test_the_published_module_splits_by_its_plan() -> None:
    limit_mb = 65536
    sharded = osdp.OptimalShardedDataParallel(_model(), [4, WIDTH, None], limit_mb, slices={"8": 2})
    optimizer = torch.optim.SGD(sharded.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        _loss(sharded, step, dear.rank()).backward()
        optimizer.step()
    plain = _model()
    reference = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(4):
        reference.zero_grad()
        for rank in range(SIZE):
            (_loss(plain, step, rank) / SIZE).backward()
        reference.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(sharded.state_dict()[f"module.{name}"], value, rtol=1e-4, atol=1e-5)
    auto = osdp.OptimalShardedDataParallel(_model(), [4, WIDTH, None], limit_mb, slices="auto")
    assert not any(isinstance(module, osdp.SlicedLinear) for module in auto.modules()), "all fits as it is"
