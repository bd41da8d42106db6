"""Rows that forward shortens (max_norm): the same on all ranks after step(), and one process's on the joined batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import dear
from overlap.features.renormed import shorten
from tests.spmd.one_process import SGD
from tests.spmd.strategies import PACKAGES, WRAP

ROWS, WIDTH = 12, 9


class Positions(nn.Embedding):
    """Looks up other rows than it is given."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward((rows + 1) % ROWS)


class ByHand(nn.Module):
    """No module announces that it shortens rows; and not from the first step on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(2 * torch.randn(ROWS, WIDTH))
        self.calls = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return functional.embedding(rows, self.table, max_norm=1.0 if self.calls > 2 else None, norm_type=1.0)


class Bags(nn.EmbeddingBag):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(rows.reshape(-1, 2))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(ROWS, WIDTH, max_norm=1.0),
    "sparse": lambda: nn.Embedding(ROWS, WIDTH, max_norm=1.0, sparse=True),
    "subclass": lambda: Positions(ROWS, WIDTH, max_norm=1.0),
    "bags": lambda: Bags(ROWS, WIDTH, max_norm=1.0),
    "by hand": ByHand,
    "frozen": lambda: nn.Embedding(ROWS, WIDTH, max_norm=1.0).requires_grad_(False),
}


def _model(kind: str) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(KINDS[kind](), nn.Linear(WIDTH, WIDTH)).double()


def _rows(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (4,), generator=torch.Generator().manual_seed(10 * step + rank))


def _train(model: nn.Module, optimizer: Any, ranks: list[int], first_pass: Any = nullcontext) -> None:
    """With an evaluation, which one rank alone makes, and a step of two passes."""
    for step in range(6):
        optimizer.zero_grad()
        if step == 3:
            with first_pass():
                model(torch.cat([_rows(50, rank) for rank in ranks])).mean().backward()
        model(torch.cat([_rows(step, rank) for rank in ranks])).square().mean().backward()
        optimizer.step()
        if step == 2 and 0 in ranks:
            with torch.no_grad():
                model(_rows(100, 0))


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("way", PACKAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_shortened_as_by_one_process(kind: str, way: str) -> None:
    reference, model = _model(kind), _model(kind)
    _train(reference, SGD(_trained(reference), 0.5, momentum=0.9), list(range(dear.size())))
    optimizer = WRAP[way](SGD(_trained(model), 0.5, momentum=0.9), model, check_every=1)
    _train(model, optimizer, [dear.rank()], optimizer.no_sync)
    optimizer.synchronize()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    dear.check_replicas(model)


def test_early_updates_are_refused() -> None:
    model = _model("embedding")
    dear.DistributedOptimizer(SGD(model.parameters(), 0.5), model, eager=True)
    if dear.size() == 1:
        model(_rows(0, 0))
        return
    with pytest.raises(ValueError, match=r"shortens rows of '0.weight' \(max_norm=1.0\).*: use eager=False"):
        model(_rows(0, 0))


def test_a_row_that_was_shortened_more_often_is_the_same_bit_for_bit() -> None:
    """As the values of ranks that looked it up more often."""
    generator = torch.Generator().manual_seed(0)
    once = 1e3 * torch.randn(2000, 7, generator=generator)
    never, thrice, rows = once.clone(), once.clone(), torch.arange(2000)
    torch.embedding_renorm_(once, rows, 1.0, 2.0)
    for _ in range(3):
        torch.embedding_renorm_(thrice, rows, 1.0, 2.0)
    assert not torch.equal(once, thrice)
    for weight in (never, once, thrice):
        shorten(weight, rows, 1.0, 2.0)
    assert torch.equal(once, thrice)
    assert torch.equal(once, never)


def test_torchscript_takes_what_looks_rows_up() -> None:
    dear.DistributedOptimizer(SGD(_model("embedding").parameters(), 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        for module in (nn.Embedding(ROWS, WIDTH, max_norm=1.0), nn.EmbeddingBag(ROWS, WIDTH, max_norm=1.0)):
            scripted: Any = torch.jit.script(module)
            assert scripted(torch.zeros(1, 2, dtype=torch.int64)).shape[-1] == WIDTH


def test_compiled_code_is_heard_in_every_call() -> None:
    reference, model = _model("embedding"), _model("embedding")
    ranks = list(range(dear.size()))
    optimizer = dear.DistributedOptimizer(SGD(model.parameters(), 0.5, momentum=0.9), model)
    compiled: Any = torch.compile(model, backend="eager")
    _train(reference, SGD(reference.parameters(), 0.5, momentum=0.9), ranks)
    _train(compiled, optimizer, [dear.rank()], optimizer.no_sync)
    optimizer.synchronize()
    torch.testing.assert_close(model[0].weight, reference[0].weight, rtol=1e-9, atol=1e-12)  # type: ignore[index]
