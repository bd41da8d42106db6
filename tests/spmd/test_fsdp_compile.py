"""Compiled modules of sharded models: the same values as uncompiled, compiled once, and whole one block at a time."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import dear
import fsdp
from overlap.core.gates.compiled import GUARDS
from tests.spmd.listening import heard
from tests.spmd.training import values_of
from tests.spmd_plugin import OVER_MPI, SIZE

WIDTH, BLOCKS = 16, 9  # more blocks than torch compiles variants of one function
Call = Callable[[torch.Tensor], torch.Tensor]
Way = Callable[[Any, str], Call]

pytestmark = pytest.mark.skipif(not GUARDS, reason="compilers of that age break their graphs at gates")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    dear.init()
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(torch.nn.Module):
    def __init__(self, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, WIDTH), torch.nn.Linear(WIDTH, 4)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.checkpoints is None else checkpoint(block, x, use_reentrant=self.checkpoints)
        return self.last(x)


def _in_place(model: Any, backend: str) -> Call:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def _made(model: Any, backend: str) -> Call:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend, fullgraph=True)
    return model


def _leaves(model: Any, backend: str) -> Call:
    for block in model.blocks:
        block.up.compile(backend=backend)
        block.down = torch.compile(block.down, backend=backend)
    return model


def _whole(model: Any, backend: str) -> Call:
    return torch.compile(model, backend=backend, fullgraph=True)


def _whole_in_place(model: Any, backend: str) -> Call:
    model.compile(backend=backend, fullgraph=True)
    return model


def _as_it_is(model: Any, _backend: str) -> Call:
    return model


def _inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def _shard(model: Blocks, units: bool, **options: Any) -> Any:
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01)
    if not units:
        return fsdp.DistributedOptimizer(optimizer, model, **options)
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    fsdp.fully_shard(model, **options)
    return optimizer


def _train(
    way: Way,
    backend: str = "aot_eager",
    *,
    units: bool = False,
    before: bool = False,
    alone: bool = False,
    accumulate: bool = False,
    checkpoints: bool | None = None,
    evaluates: bool = True,
    **options: Any,
) -> tuple[list[torch.Tensor], list[int]]:
    """Parameters after some steps with an evaluation between them, and how many graphs there were after each step."""
    torch.default_generator.manual_seed(5)
    model = Blocks(checkpoints)
    call = way(model, backend) if before else model
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01) if alone else _shard(model, units, **options)
    call = call if before else way(model, backend)
    graphs, earlier = [], torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2 if accumulate else 1):
            held = accumulate and part == 0
            if units and accumulate:
                model.set_requires_gradient_sync(not held)  # type: ignore[operator]
            with optimizer.no_sync() if held and not units and not alone else nullcontext():
                for rank in range(SIZE) if alone else [dear.rank()]:
                    loss = call(_inputs(2 * step + part, rank)).square().mean()
                    (loss / SIZE if alone else loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        model.train(not evaluates)
        with torch.no_grad() if evaluates else nullcontext():
            assert not evaluates or bool(call(_inputs(step, 0)).isfinite().all())
        model.train()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - earlier)
    return values_of(model) if not alone else [each.detach() for each in model.parameters()], graphs


def _check(way: Way, backend: str = "aot_eager", most: int = 2, **options: Any) -> None:
    """`most` graphs: one that trains, and one that evaluates, for each function that is compiled."""
    actual, graphs = _train(way, backend, **options)
    assert len(set(graphs)) == 1, f"compiled again: {graphs}"
    assert 0 < graphs[0] <= most, graphs
    plain = {name: value for name, value in options.items() if name != "before"}
    expected, _ = _train(_as_it_is, **plain)
    for mine, value in zip(actual, expected, strict=True):
        assert torch.equal(mine, value)


@pytest.mark.parametrize("units", [False, True], ids=["optimizer", "fully_shard"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("way", [_in_place, pytest.param(_made, marks=pytest.mark.full)])
def test_blocks_are_compiled_once_and_train_as_uncompiled(way: Way, before: bool, units: bool) -> None:
    _check(way, before=before, units=units)


@pytest.mark.parametrize(
    "way",
    [_in_place, *(pytest.param(way, marks=pytest.mark.full) for way in (_made, _leaves, _whole, _whole_in_place))],
)
def test_a_compiled_module_may_hold_several_buckets(way: Way) -> None:
    _check(way, "eager", 4, threshold_mb=0.001, poison=True)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("way", [_whole, pytest.param(_whole_in_place, marks=pytest.mark.full)])
def test_a_model_is_compiled_as_a_whole_with_a_warning(way: Way, before: bool) -> None:
    with heard(logging.WARNING) as told:
        _check(way, "eager", units=True, before=before)
    assert sum("compile it block by block" in text for text in told) == (dear.rank() == 0)


@pytest.mark.parametrize("checkpoints", [True, False], ids=["reentrant", "not reentrant"])
def test_a_compiled_block_is_recomputed(checkpoints: bool) -> None:
    _check(_in_place, checkpoints=checkpoints, most=4)


@pytest.mark.parametrize("units", [False, True], ids=["optimizer", "fully_shard"])
def test_gradients_of_compiled_blocks_accumulate(units: bool) -> None:
    _check(_in_place, accumulate=True, units=units)


def test_parameters_that_are_gathered_rounded() -> None:
    _check(_in_place, gather_dtype=torch.bfloat16)


def test_parameters_of_16_bits() -> None:
    _check(_made, units=True, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


@pytest.mark.skipif(not OVER_MPI or SIZE > 2, reason="takes long, and ranks compile alike")
@pytest.mark.full
def test_inductor() -> None:
    actual, graphs = _train(_in_place, "inductor", units=True, evaluates=False)
    assert set(graphs) == {1}, f"compiled again: {graphs}"
    expected, _ = _train(_in_place, "inductor", alone=True, evaluates=False)
    for mine, value in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-5)


def test_one_compiled_block_is_whole_at_a_time() -> None:
    """Beside what may be: four buckets."""
    torch.default_generator.manual_seed(5)
    model = Blocks()
    optimizer: Any = _shard(model, units=False, threshold_mb=0.002)
    _made(model, "eager")
    whole: list[int] = []
    for block in model.blocks:
        block.register_forward_hook(
            lambda *_: whole.append(sum(bucket.parameters.there for bucket in optimizer.buckets)), prepend=True
        )
    for step in range(3):
        optimizer.zero_grad()
        model(_inputs(step, dear.rank())).square().mean().backward()
        assert not any(bucket.parameters.there for bucket in optimizer.buckets), "backward has freed what it used"
        optimizer.step()
    assert len(optimizer.buckets) > 20
    assert 0 < max(whole) <= 10


def test_a_graph_break_inside_of_a_compiled_block() -> None:
    class Broken(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.up(self.norm(x))
            torch._dynamo.graph_break()
            return self.down(torch.tanh(x))

    def train(compiled: bool) -> list[torch.Tensor]:
        torch.default_generator.manual_seed(5)
        model = Blocks()
        for number in range(BLOCKS):
            model.blocks[number] = Broken()
        optimizer: Any = _shard(model, units=False, threshold_mb=0.001, poison=True)
        for block in model.blocks if compiled else ():
            block.compile(backend="aot_eager")
        for step in range(3):
            optimizer.zero_grad()
            model(_inputs(step, dear.rank())).square().mean().backward()
            optimizer.step()
        return values_of(model)

    for mine, value in zip(train(True), train(False), strict=True):
        assert torch.equal(mine, value)


def test_compiled_code_in_which_parameters_are_whole_already() -> None:
    torch.default_generator.manual_seed(5)
    model = Blocks()
    optimizer: Any = _shard(model, units=False)
    _in_place(model, "eager")
    x = _inputs(0, 0)
    with torch.no_grad():
        expected = model(x)
    with dear.whole(model), torch.no_grad():
        torch.testing.assert_close(model(x), expected)
        torch.testing.assert_close(copy.deepcopy(model)(x), expected)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_a_compiled_function_around_a_module_is_refused_by_name() -> None:
    torch.default_generator.manual_seed(5)
    model = Blocks()
    optimizer: Any = _shard(model, units=False)
    with pytest.raises(RuntimeError, match=r"compile modules, not functions that call them"):
        torch.compile(lambda x: model(x) * 2, backend="eager")(_inputs(0, 0))
    optimizer.zero_grad()
    model(_inputs(0, dear.rank())).square().mean().backward()
    optimizer.step()
