"""Blocks that backward computes again under a memory limit: the same results, and limits that nothing else fits."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import dear
import osdp
from osdp.activations import Blocks
from osdp.memory_plan import MARGIN
from osdp.watching import Watching
from tests.spmd.training import local_loss, values_of
from tests.spmd_plugin import SIZE

MB = 2**20
WIDTH, LAYERS, COPIES = 64, 5, 192
BASE = 500 * MB


class Block(torch.nn.Module):
    """It saves a lot for its size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.drop = torch.nn.Dropout(0.1)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.tanh(self.up(x)).repeat(COPIES, 1)
        wide = (self.drop(wide) * 2).sigmoid() * self.scale
        return x + self.down(wide.view(COPIES, *x.shape).mean(0))


def _model() -> torch.nn.Sequential:
    torch.default_generator.manual_seed(11)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(LAYERS)), torch.nn.Tanh())


def _loss(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    torch.default_generator.manual_seed(100 * step + rank)  # for Dropout
    return local_loss(model, step, rank, WIDTH, torch.float32)


def _is_block(module: torch.nn.Module) -> bool:
    return isinstance(module, Block)


def _trained(strategy: str | None, steps: int = 8, **options: Any) -> tuple[list[torch.Tensor], Any, torch.nn.Module]:
    model = _model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3)
    ranks = range(SIZE)
    if strategy is not None:
        optimizer = dear.DistributedOptimizer(optimizer, model, strategy=strategy, threshold_mb=0, **options)
        ranks = range(dear.rank(), dear.rank() + 1)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in ranks:
            (_loss(model, step, rank) / len(ranks)).backward()
        optimizer.step()
    return values_of(model), optimizer, model


def _limit(more: float) -> float:
    return (BASE + more) / (1 - MARGIN) / 2**30 + 1e-6


@pytest.fixture(autouse=True)
def _fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank takes is said here, and is as predicted: it differs from job to job elsewhere."""
    monkeypatch.setattr(
        Watching, "_told", lambda watching: (BASE + (0 if watching.plan is None else watching.plan.more), MB)
    )


def _saved() -> int:
    """Of one block."""
    blocks = Blocks(_model(), _is_block)
    blocks.measure()
    model = blocks._modules["1"]
    model(torch.randn(4, WIDTH, requires_grad=True))
    (nbytes, *_) = (each for each in blocks.measured(1).values() if each)
    blocks.stop()
    return nbytes


def test_a_limit_that_nothing_else_fits() -> None:
    less = 2.5 * _saved()
    with pytest.raises(MemoryError, match="blocks to recompute"):
        _trained("osdp", memory_limit_gb=_limit(-less))
    mine, optimizer, model = _trained("osdp", memory_limit_gb=_limit(-less), recompute=_is_block)
    plan = optimizer._planned.plan
    assert 3 <= len(plan.recomputed) < LAYERS
    assert plan.more <= -less
    assert f"{len(plan.recomputed)} of {LAYERS} blocks" in optimizer.explain()
    assert dear.allgather_object(plan.choice) == [plan.choice] * SIZE
    assert {name for name, _ in model.named_modules()} == {name for name, _ in _model().named_modules()}
    for strategy in ("dear", "fsdp"):
        for value, expected in zip(mine, _trained(strategy)[0], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
            assert SIZE > 2 or torch.equal(value, expected), strategy
    for value, expected in zip(mine, _trained(None)[0], strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


def test_each_bucket_is_gathered_as_often() -> None:
    """Where a block is computed again, backward gathers what it needs anyway."""
    counts = []
    for recompute in (False, _is_block):
        limit = _limit(0) if recompute is False else _limit(-2.5 * _saved())
        rules = {str(number): "free_full_weight" for number in range(LAYERS + 1)}
        _, optimizer, _ = _trained("osdp", memory_limit_gb=limit, recompute=recompute, fsdp_plan=rules)
        assert bool(optimizer._planned.plan.recomputed) is (recompute is not False)
        assert not optimizer._planned.plan.kept
        counts.append(optimizer._engine.unsharder.gathered)
    assert counts[0] == counts[1]


def test_with_enough_memory_nothing_is_computed_again() -> None:
    _, optimizer, model = _trained("osdp", memory_limit_gb=64.0, recompute=_is_block)
    plan = optimizer._planned.plan
    assert len(plan.job.blocks) == LAYERS
    assert plan.recomputed == ()
    assert "forward" not in vars(model[1])
    assert plan.job.blocks[0].nbytes == dear.broadcast_object(plan.job.blocks[0].nbytes) > COPIES * WIDTH * 4


def test_what_is_switched_on_leaves_the_module_as_it_is() -> None:
    model = _model()
    blocks = Blocks(model, [model[1], model[2]])
    assert blocks.names == ("1", "2")
    blocks.switch(("1",))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other[1], Block)
        assert list(other.state_dict()) == list(_model().state_dict())
        assert other[1].forward.args[0].__self__ is other[1], "its own parameters are used"
        seen = []
        other[1].up.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        other(torch.randn(2, WIDTH)).sum().backward()
        assert len(seen) == 2
    blocks.switch(("2",))
    assert "forward" not in vars(model[1])
    blocks.end()
    assert "forward" not in vars(model[2])


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return torch.tanh(self.linear(x)).sigmoid()


def test_what_cannot_be_computed_again() -> None:
    norm = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))
    with pytest.raises(ValueError, match="'' changes buffers"):
        Blocks(norm, [norm])
    with pytest.raises(ValueError, match="recompute has Tanh, and Sequential has no such"):
        Blocks(norm, [torch.nn.Tanh()])
    with pytest.raises(TypeError, match="should be None, False, modules"):
        Blocks(norm, True)
    compiled = _model()
    compiled[1].compile(backend="eager")
    with pytest.raises(ValueError, match="'1' is compiled"):
        Blocks(compiled, [compiled[1]])
    assert Blocks(norm).names == ()
    model = torch.nn.Sequential(Counting(), torch.nn.Linear(WIDTH, WIDTH))
    optimizer = osdp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, memory_limit_gb=64.0, recompute=[model[0]]
    )
    for step in range(2):
        _loss(model, step, dear.rank()).backward()
        optimizer.step()
    _loss(model, 2, dear.rank()).backward()
    with pytest.raises(ValueError, match="'0' changes buffers"):
        optimizer.step()
