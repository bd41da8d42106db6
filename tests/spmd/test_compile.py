"""``torch.compile`` of the model, before and after wrapping: parity, no stale value, nothing compiled twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dear
from overlap.core.bucket import Phase
from overlap.core.gates.compiled import GUARDS
from tests.spmd.loops import Run
from tests.spmd.models import WIDTH
from tests.spmd.strategies import NAMELESS, OPTIMIZERS, WRAP
from tests.spmd.training import assert_close
from tests.spmd_plugin import OVER_MPI, SIZE

Call = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _session() -> None:
    dear.init()
    torch.compiler.reset()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.linear(x)))


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def _whole(model: Any) -> Call:
    return torch.compile(model, backend="eager", fullgraph=GUARDS)


def _in_place(model: Any) -> Call:
    model.compile(backend="eager", fullgraph=GUARDS)
    return model


def _function(model: Any) -> Call:
    return torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=GUARDS)


def _blocks(model: Any) -> Call:
    model.first, model.second = (torch.compile(block, backend="eager") for block in (model.first, model.second))
    return model


def _blocks_in_place(model: Any) -> Call:
    model.first.compile(backend="eager")
    model.second.compile(backend="eager")
    return model


def _model() -> torch.nn.Module:
    torch.manual_seed(1234)
    return Blocks().double()


def _step(call: Call, optimizer: Any, run: Run, number: int) -> None:
    x, y = run.batch(number)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(call(x), y).backward()
    optimizer.step()


# Each way with a strategy, each strategy with a way; the steps run before the model is compiled, None: before wrapping.
WAYS: list[tuple[Callable[[Any], Call], int | None, str]] = [
    (_whole, None, "dear"),
    (_blocks, 0, "wfbp"),
]
PARTS = [_blocks]
WAYS += [(_function, 0, name) for name in NAMELESS]
if SIZE == 2 and OVER_MPI:  # how the compiler was called is all the same to any others
    WAYS += [
        (_whole, 0, "oss"),
        (_in_place, 2, "mgwfbp"),
        (_blocks, None, "dear-layerwise"),
        (_blocks_in_place, 2, "bytescheduler"),
    ]
    PARTS.append(_blocks_in_place)
EVERY = [  # where slow tests run
    (way, before, s)
    for way in (_whole, _in_place, _function, _blocks, _blocks_in_place)
    for before in (None, 0, 2)
    for s in WRAP
]


@pytest.mark.parametrize(
    ("way", "steps_before", "strategy"),
    [*WAYS, *(pytest.param(*row, marks=pytest.mark.slow) for row in EVERY if row not in WAYS)],
)
def test_parity(way: Callable[[Any], Call], steps_before: int | None, strategy: str) -> None:
    alone, model = _model(), _model()
    plain = OPTIMIZERS["adamw"](list(alone.parameters()))
    inner = OPTIMIZERS["adamw"](list(model.parameters()))
    call: Call = model
    if steps_before is None:  # and called, so that the code was made for a model without gates
        call = way(model)
        call(torch.ones(8 // dear.size(), WIDTH, dtype=torch.float64)).sum().backward()
        model.zero_grad()
    optimizer = (WRAP | NAMELESS)[strategy](inner, model)
    graphs = []
    for step in range(5):
        if step == steps_before:
            call = way(model)
        _step(alone, plain, Run(alone, plain, None, dear.size()), step)
        _step(call, optimizer, Run(model, optimizer, dear.rank(), dear.size()), step)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    actual = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}
    assert_close(actual, alone.state_dict(), "model")
    assert_close(optimizer.state_dict(), plain.state_dict(), "optimizer")
    assert graphs[-1] == graphs[steps_before or 0] > 0, f"compiled again: {graphs}"


@pytest.mark.parametrize("way", PARTS)
def test_each_compiled_block_waits_for_its_own_parameters(way: Callable[[Any], Call]) -> None:
    model = _model()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = dear.DistributedOptimizer(inner, model, threshold_mb=None, num_nearby_layers=1)
    call = way(model)
    run = Run(model, optimizer, dear.rank(), dear.size())
    for step in range(2):
        _step(call, optimizer, run, step)
    later = [bucket for bucket in optimizer.buckets if bucket.slots[0].name.startswith("second")]
    assert len(later) == 2
    x, _ = run.batch(2)
    model.first(x)
    assert all(bucket.phase is Phase.GATHERING for bucket in later)
    assert all(bucket.phase is Phase.FILLING for bucket in optimizer.buckets if bucket not in later)
    assert bool(torch.isfinite(call(x)).all())
    assert all(bucket.phase is Phase.FILLING for bucket in later)
